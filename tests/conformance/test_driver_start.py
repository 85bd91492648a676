# SPDX-License-Identifier: Apache-2.0
"""What a driver refuses to start with, and what it does where memory cannot be had.

Driver Model §4.2, §4.3, §4.6, §9, §11, §17. Refusals at start are exit code 1 and one line for the operator.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    ResponseCode,
    Role,
)
from tests.shm.by_hand import mounted
from tests.support.driver_client import DriverClient, attach_request
from tests.support.driver_process import NSLOTS, Deployment, DriverProcess, path_of
from tests.support.listener import DriverEnded

STREAM, HUGE = 15_000, 15_001
CAP_IPC_LOCK = 14

Make = Callable[..., Deployment]


@pytest.fixture
def make(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Make:
    def make(**tables: Any) -> Deployment:
        return Deployment(shm_dir, shared_media_driver.aeron_dir, streams=[STREAM], **tables)

    return make


def starts(process: DriverProcess, client: DriverClient) -> bool:
    """Whether the driver serves; False if it ended instead."""
    try:
        client.meet(process)
        return True
    except DriverEnded as error:
        ended = error
    assert ended.code == 1, ended
    assert len(ended.output.splitlines()) == 1, ended
    return False


def refusal_at_start(process: DriverProcess) -> str:
    """The one line with which a driver that cannot serve ends."""
    with process:
        code, output = process.finish()
    assert code == 1, output
    (line,) = output.splitlines()
    return line


# --- configuration


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        pytest.param(
            {"driver": {"stream_id_range": "14990-15010"}},
            "driver.stream_id_range",
            id="overlap",
            marks=pytest.mark.spec("DRV-11-10", "DRV-11-13"),
        ),
        pytest.param({"policies": {"anounce_period_ms": 5}}, "policies.announce_period_ms", id="misspelt"),
        pytest.param({"driver": {"control_stream_id": "many"}}, "driver.control_stream_id", id="type"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(make: Make, tables: dict[str, Any], words: str) -> None:
    """The line names the key; no file is made."""
    deployment = make(**tables)
    assert words in refusal_at_start(deployment.start())
    assert not deployment.base_dir.exists()


@pytest.mark.spec("DRV-4.3-09", "DRV-17-09")
def test_a_stream_without_pools_cannot_be_attached_to(make: Make) -> None:
    """The driver does not start with it and names the key; were it made by hand, it would be INVALID_PARAMS."""
    deployment = make(profiles={"small": {"header_nslots": NSLOTS, "payload_pools": []}})
    assert "profiles.small.payload_pools" in refusal_at_start(deployment.start())


@pytest.mark.spec("DRV-11-03")
def test_dynamic_streams_without_ids_are_refused(make: Make) -> None:
    """At startup, with the key that is missing."""
    deployment = make(policies={"allow_dynamic_streams": True})
    assert "driver.stream_id_range" in refusal_at_start(deployment.start())


# --- places


@pytest.mark.parametrize("kind", ["read-only", "file", "aeron"])
def test_a_place_that_cannot_be_used_is_refused_in_one_line(make: Make, shm_dir: Path, kind: str) -> None:
    """A base directory where nothing can be made, or an Aeron directory that is a file."""
    if kind == "read-only":
        with mounted(shm_dir / "ro", "tmpfs", "ro") as folder:
            deployment = make(shm={"base_dir": str(folder / "shm")})
            assert str(folder) in refusal_at_start(deployment.start())
        return
    (shm_dir / "plain").write_text("")
    if kind == "file":
        deployment = make(shm={"base_dir": str(shm_dir / "plain" / "shm")})
    else:
        deployment = make()
        deployment.aeron_dir = str(shm_dir / "plain")
    assert str(shm_dir / "plain") in refusal_at_start(deployment.start())
    assert deployment.leftovers() == []


@pytest.mark.spec("DRV-9-01")
def test_a_link_in_place_of_the_namespace_is_not_followed(make: Make, shm_dir: Path) -> None:
    """A link that another user plants in the base directory gets none of our files, and its target stays as it is."""
    deployment = make()
    (shm_dir / "elsewhere").mkdir()
    user_dir = deployment.base_dir / f"tensorpool-{subprocess.check_output(['id', '-un'], text=True).strip()}"
    user_dir.mkdir(parents=True)
    (user_dir / "lab").symlink_to(shm_dir / "elsewhere")
    assert str(deployment.base_dir) in refusal_at_start(deployment.start())
    assert list((shm_dir / "elsewhere").iterdir()) == []
    assert stat.S_IMODE((shm_dir / "elsewhere").stat().st_mode) != 0o2750


@pytest.mark.spec("DRV-9-02", "DRV-9-03", "DRV-4.6-05", "DRV-17-03")
def test_links_to_the_base_are_resolved_and_other_files_are_not_used(make: Make, shm_dir: Path) -> None:
    """Announced paths have no link in them; a FIFO in the place of a stream is an error of that stream alone."""
    deployment = make(shm={"base_dir": str(shm_dir / "link"), "namespace": "overridden"})
    deployment.tables["streams"]["fifo"] = {"stream_id": HUGE, "profile": "small"}
    (shm_dir / "real").mkdir()
    (shm_dir / "link").symlink_to(shm_dir / "real")
    user_dir = shm_dir / "real" / f"tensorpool-{subprocess.check_output(['id', '-un'], text=True).strip()}"
    (user_dir / "lab").mkdir(parents=True)
    os.mkfifo(user_dir / "lab" / str(HUGE))
    with deployment.start(SHM_NAMESPACE="lab") as process, DriverClient(deployment) as client:
        client.meet(process)
        path = path_of(client.next_announce(STREAM).message.header_region_uri)
        assert path.is_relative_to(shm_dir / "real" / user_dir / "lab")
        assert path.resolve() == path
        for role in Role:
            refusal = client.refused(attach_request(HUGE, role))
            assert refusal.code is ResponseCode.INTERNAL_ERROR
            assert refusal.error_message
        assert not client.received(ShmPoolAnnounce, stream_id=HUGE)
        assert client.attach(STREAM, Role.PRODUCER)
    assert stat.S_ISFIFO((user_dir / "lab" / str(HUGE)).lstat().st_mode)


# --- memory


@pytest.mark.spec("DRV-4.6-05", "DRV-4.2-35", "DRV-4.2-36")
def test_memory_that_cannot_be_had_is_an_internal_error_in_a_limited_text(make: Make, shm_dir: Path) -> None:
    """The refusal says what is missing, in at most 1024 bytes; the driver and its other streams go on."""
    terabytes = {"header_nslots": 1 << 20, "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 24}]}
    deep = shm_dir.joinpath(*["d" * 250] * 5)
    deep.mkdir(parents=True)
    with mounted(deep / "small", "tmpfs", "size=64m") as base_dir:
        deployment = make(shm={"base_dir": str(base_dir)}, profiles={"terabytes": terabytes})
        deployment.tables["streams"]["terabytes"] = {"stream_id": HUGE, "profile": "terabytes"}
        with deployment.start() as process, DriverClient(deployment) as client:
            client.meet(process)
            before = client.next_announce(STREAM).message
            refusal = client.refused(attach_request(HUGE, Role.PRODUCER))
            assert refusal.code is ResponseCode.INTERNAL_ERROR
            assert len(refusal.error_message.encode()) == 1024, "cut off, it would be longer than the mount's path"
            lease = client.attach(STREAM, Role.PRODUCER)
            assert lease.epoch > before.epoch
            client.detach(lease)


@pytest.mark.spec("DRV-4.3-08", "DRV-9-04")
def test_huge_pages_by_policy_are_not_served_from_ordinary_ones(make: Make) -> None:
    """shm.require_hugepages on tmpfs: the driver does not start, and names the key."""
    deployment = make(shm={"require_hugepages": True})
    assert "shm.require_hugepages" in refusal_at_start(deployment.start())


@pytest.mark.spec("DRV-4.3-07")
def test_standard_pages_are_rejected_where_there_are_none(make: Make, shm_dir: Path) -> None:
    """On hugetlbfs STANDARD cannot be had, whatever the policy."""
    with mounted(shm_dir / "huge", "hugetlbfs") as folder:
        deployment = make(shm={"base_dir": str(folder / "shm"), "require_hugepages": True})
        with deployment.start() as process, DriverClient(deployment) as client:
            client.meet(process)
            refusal = client.refused(attach_request(STREAM, require_hugepages=HugepagesPolicy.STANDARD))
            assert refusal.code is ResponseCode.REJECTED
            assert process.terminate()[0] == 0


@pytest.mark.spec("DRV-17-30")
def test_a_driver_that_may_not_lock_its_memory_does_not_start(make: Make) -> None:
    """With mlock_shm and a limit of 0: exit code 1 and one line with the key, the numbers and the remedy."""
    deployment = make(policies={"mlock_shm": True})
    unlocked = f"""
import ctypes, resource
ctypes.CDLL(None).prctl(24, {CAP_IPC_LOCK}, 0, 0, 0)  # PR_CAPBSET_DROP: root is bound by the limit too
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
"""
    with deployment.start_limited(unlocked) as process:
        code, output = process.finish()
    assert code == 1
    (line,) = output.splitlines()
    assert line.startswith("error: policies.mlock_shm = True")
    assert re.search(r"\d+ bytes have to be locked, `ulimit -l` allows 0: ulimit -l \d+", line), line
    assert deployment.leftovers() == []
