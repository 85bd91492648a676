# SPDX-License-Identifier: Apache-2.0
"""Memory that is scarce, slow to come by, or not ours to take: clients get a reason, the driver serves the others."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse, ShmLeaseRevoked
from tests.shm.by_hand import NOBODY, mounted
from tests.support.chaos import TOKEN, end
from tests.support.driver_client import DriverClient, attach_request
from tests.support.driver_process import Deployment, DriverProcess, path_of
from tests.support.processes import Process, wait_until

MIB = 1 << 20
SMALL, MIDDLE, SECOND_MIDDLE, LARGE = 32_000, 32_001, 32_002, 32_003
RETIRED_BYTES = 3 * 4096  # a superblock page for each region of a sparse epoch of SMALL
SLOTS = {MIDDLE: 32, SECOND_MIDDLE: 32, LARGE: 64}  # of 1 MiB each


def profile(nslots: int) -> dict[str, object]:
    return {"header_nslots": nslots, "payload_pools": [{"pool_id": 1, "stride_bytes": MIB}]}


def epoch_bytes(nslots: int) -> int:
    """What an epoch takes of a mount, in whole pages: the header ring and one pool, each behind a superblock."""
    return sum(-(-(64 + nslots * slot) // 4096) * 4096 for slot in (256, MIB))


# --- a full mount


@pytest.fixture
def mount(shm_dir: Path) -> Iterator[Path]:
    """64 MiB."""
    with mounted(shm_dir / "mount", "tmpfs", "size=64m") as mount:
        yield mount


@pytest.fixture
def deployment(shared_media_driver: aeron.MediaDriver, shm_dir: Path, mount: Path) -> Deployment:
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=[SMALL, MIDDLE, SECOND_MIDDLE, LARGE],
        shm={"base_dir": str(mount / "shm")},
        policies={"epoch_gc_keep": 1, "shutdown_token": TOKEN, "lease_keepalive_interval_ms": 700},
        profiles={f"of{nslots}": profile(nslots) for nslots in set(SLOTS.values())},
    )
    for stream_id, nslots in SLOTS.items():
        deployment.tables["streams"][f"s{stream_id}"]["profile"] = f"of{nslots}"
    return deployment


@pytest.fixture
def process(deployment: Deployment) -> Iterator[DriverProcess]:
    with deployment.start() as process:
        yield process
        assert not process.has_ended, process.finish()
        with DriverClient(deployment) as client:
            end(process, client)
        assert deployment.leftovers() == []


@pytest.fixture
def client(deployment: Deployment, process: DriverProcess) -> Iterator[DriverClient]:
    """When every stream has its first epoch: from now on nothing is taken of the mount unasked."""
    with DriverClient(deployment) as client:
        client.meet(process)
        for stream_id in (SMALL, *SLOTS):
            client.next_announce(stream_id)
        yield client


def free_bytes(mount: Path) -> int:
    found = os.statvfs(mount)
    return found.f_bavail * found.f_frsize


def fill(mount: Path, leave_bytes: int = 0) -> Path:
    """Another program takes what is free."""
    hog = mount / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (more := min(free_bytes(mount) - leave_bytes, 1 << 20)) > 0:
            file.write(bytes(more))
    return hog


def reported_free_bytes(mount: Path, refusal: ShmAttachResponse) -> int:
    found = re.search(rf"{mount} has (\d+) bytes", refusal.error_message)
    assert found is not None, refusal
    return int(found[1])


def assert_whole(deployment: Deployment) -> None:
    """Below the base there is nothing but whole epochs: no half-made directory, no name of our own making."""
    retired = "*/*/*/.*.retired"  # a worker is about to remove it
    wait_until(lambda: not list(deployment.base_dir.glob(retired)), "what was retired is removed")
    for folder in deployment.base_dir.glob("*/*/*/*"):
        assert folder.name.isdecimal(), folder
        assert "header.ring" in os.listdir(folder), folder


def test_an_epoch_that_does_not_fit_is_refused_with_its_bill(
    deployment: Deployment, client: DriverClient, mount: Path
) -> None:
    """INTERNAL_ERROR: what is needed, what is free, where, what to do; nothing is left, and others are served."""
    announced = client.next_announce(LARGE).message.epoch
    free = free_bytes(mount)
    refusal = client.refused(attach_request(LARGE, Role.PRODUCER))
    assert refusal.code is ResponseCode.INTERNAL_ERROR
    assert f"needs {epoch_bytes(64)} bytes" in refusal.error_message
    assert free >= reported_free_bytes(mount, refusal) >= free_bytes(mount)
    assert re.search(rf"remount,size=\d+m {mount}.*--shm-size=\d+m", refusal.error_message)
    assert deployment.epochs(LARGE) == [announced], "not even a directory was made"

    consumer = client.attach(LARGE)
    assert consumer.epoch == announced, "who only reads needs no memory yet"
    producer = client.attach(SMALL, Role.PRODUCER)
    assert client.detach(producer).message.code is ResponseCode.OK
    assert client.detach(client.attach(MIDDLE, Role.PRODUCER)).message.code is ResponseCode.OK
    assert client.detach(consumer).message.code is ResponseCode.OK
    assert_whole(deployment)


def test_the_same_attach_succeeds_once_there_is_space(
    deployment: Deployment, client: DriverClient, mount: Path
) -> None:
    """Refused while another program has the space; granted, with all its memory, when that is gone."""
    hog = fill(mount, leave_bytes=16 * MIB)
    free = free_bytes(mount)
    request = attach_request(MIDDLE, Role.PRODUCER)
    refusal = client.refused(request)
    assert refusal.code is ResponseCode.INTERNAL_ERROR
    assert f"needs {epoch_bytes(32)} bytes" in refusal.error_message
    assert reported_free_bytes(mount, refusal) == free
    assert free_bytes(mount) == free, "what was refused takes nothing"
    hog.unlink()
    lease = client.granted(request)
    assert free_bytes(mount) <= 64 * MIB - epoch_bytes(32)
    assert client.detach(lease).message.code is ResponseCode.OK
    wait_until(lambda: free_bytes(mount) > 63 * MIB, "its memory is given back")
    assert_whole(deployment)


def test_two_epochs_that_fit_only_one_by_one_harm_no_other_client(
    deployment: Deployment, client: DriverClient, mount: Path
) -> None:
    """Asked for at the same moment, when each would fit: at most one is granted, nothing is left of the other."""
    fill(mount, leave_bytes=40 * MIB)
    requests = [attach_request(id, Role.PRODUCER) for id in (MIDDLE, SECOND_MIDDLE)]
    for request in requests:
        client.send(request)
    answers = [
        client.wait_for(ShmAttachResponse, correlation_id=request.correlation_id).message for request in requests
    ]
    refused = [answer for answer in answers if answer.code is not ResponseCode.OK]
    assert refused
    for answer in refused:
        assert answer.code is ResponseCode.INTERNAL_ERROR
        assert f"{mount} has " in answer.error_message
    assert_whole(deployment)
    wait_until(
        lambda: len(client.received(ShmLeaseRevoked)) == 2 - len(refused) or client.poll(), "the granted one expires"
    )
    wait_until(lambda: free_bytes(mount) > 39 * MIB, "its memory is given back")
    for stream_id in (MIDDLE, SECOND_MIDDLE):
        lease = client.attach(stream_id, Role.PRODUCER)
        assert client.detach(lease).message.code is ResponseCode.OK
        wait_until(lambda: free_bytes(mount) > 39 * MIB, "its memory is given back")
    assert_whole(deployment)


def test_without_a_single_page_the_driver_lives_on(
    deployment: Deployment, process: DriverProcess, client: DriverClient, mount: Path
) -> None:
    """When not even an epoch without producer can be made the driver says so and tries again; no signal ends it."""
    lease = client.attach(SMALL, Role.PRODUCER)
    hog = fill(mount)
    assert free_bytes(mount) == 0
    detached = client.detach(lease)  # which calls for a new epoch
    assert detached.message.code is ResponseCode.OK
    refusal = client.refused(attach_request(SMALL, Role.CONSUMER))
    assert refusal.code is ResponseCode.INTERNAL_ERROR
    assert reported_free_bytes(mount, refusal) == 0, refusal.error_message
    refusal = client.refused(attach_request(SMALL, Role.PRODUCER))
    assert refusal.code is ResponseCode.INTERNAL_ERROR
    assert reported_free_bytes(mount, refusal) <= RETIRED_BYTES, "a retired epoch without a producer was freed, in vain"
    assert client.next_announce(MIDDLE).message.producer_id == 0, "other streams go on"
    assert client.detach(client.attach(MIDDLE)).message.code is ResponseCode.OK
    assert not process.has_ended
    assert_whole(deployment)
    client.poll()
    assert not client.received(ShmPoolAnnounce, detached.index, stream_id=SMALL, epoch=lease.epoch)
    hog.unlink()
    again = client.next_announce(SMALL).message
    assert again.epoch > lease.epoch
    assert client.detach(client.attach(SMALL, Role.PRODUCER)).message.code is ResponseCode.OK
    assert_whole(deployment)


# --- gigabytes

BIG, OTHERS = 33_000, range(33_001, 33_004)
BIG_SLOTS = 2048
PERIOD_NS = 50_000_000
BOUND_NS = 1_500_000_000  # or half the creation, where everything takes longer; blocked it would be all of it


def test_creating_two_gibibytes_delays_no_other_client(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """While a producer's epoch is reserved and prefaulted, and later let go and removed, others are served as ever.

    Announces keep their cadence, attaches are answered, and a lease that is kept alive stays.
    """
    assert free_bytes(shm_dir) > 2 * BIG_SLOTS * MIB, "needs 4 GiB of /dev/shm"
    deployment = Deployment(
        shm_dir,
        shared_media_driver.aeron_dir,
        streams=[BIG, *OTHERS],
        policies={
            "announce_period_ms": PERIOD_NS // 1_000_000,
            "lease_keepalive_interval_ms": 500,
            "epoch_gc_keep": 1,
        },
        profiles={"big": profile(BIG_SLOTS)},
    )
    deployment.tables["streams"][f"s{BIG}"]["profile"] = "big"
    with deployment.start() as process, DriverClient(deployment) as client:
        client.meet(process)
        kept = client.attach(OTHERS[0])
        client.kept.append(kept)
        latencies: list[int] = []

        def attach_until(is_done: Callable[[], object]) -> int:
            """Others attach meanwhile, one after the other; how long it took."""
            begin_ns = time.monotonic_ns()
            while not is_done():
                asked_ns = time.monotonic_ns()
                lease = client.attach(OTHERS[1])
                latencies.append(lease.received.received_ns - asked_ns)
                client.send(lease.detach())
            return time.monotonic_ns() - begin_ns

        request = attach_request(BIG, Role.PRODUCER)
        client.send(request)
        creation_ns = attach_until(lambda: client.received(ShmAttachResponse, correlation_id=request.correlation_id))
        (answer,) = client.received(ShmAttachResponse, correlation_id=request.correlation_id)
        assert answer.message.code is ResponseCode.OK, answer.message
        pool = path_of(answer.message.payload_pools[0].region_uri)
        assert pool.stat().st_blocks * 512 >= BIG_SLOTS * MIB, "the memory is there"
        assert len(latencies) > 1, "others were served meanwhile"

        attach_until(lambda: client.received(ShmLeaseRevoked, client_id=request.client_id))  # no client keeps it alive
        attach_until(lambda: len(list(deployment.base_dir.glob(f"*/*/{BIG}/*"))) == 1)  # and the rest is removed

        gaps = {
            later.received_ns: later.received_ns - earlier.received_ns
            for id in OTHERS
            for earlier, later in itertools.pairwise(client.received(ShmPoolAnnounce, stream_id=id))
        }
        making = max(gap for at_ns, gap in gaps.items() if at_ns <= answer.received_ns)
        letting_go = max(gap for at_ns, gap in gaps.items() if at_ns > answer.received_ns)
        figures = {
            "creation": creation_ns,
            "longest gap meanwhile": making,
            "longest gap afterwards": letting_go,
            "slowest attach": max(latencies),
        }
        print(", ".join(f"{name} {duration / 1e6:.0f} ms" for name, duration in figures.items()))
        bound_ns = max(BOUND_NS, creation_ns // 2)
        assert making < PERIOD_NS + bound_ns
        assert letting_go < PERIOD_NS + bound_ns
        assert max(latencies) < bound_ns
        client.fence()
        assert not client.received(ShmLeaseRevoked, lease_id=kept.lease_id)
        client.kept.clear()
        assert client.detach(kept).message.code is ResponseCode.OK


# --- another user's directory

_AS_NOBODY = """
import os, sys
import structlog, tensorpool.cli.driver  # while its files can be read
from tensorpool.cli.main import main

os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv.pop(1)))
main()
"""


def test_a_base_directory_that_is_not_writable_is_refused_in_one_line(shm_dir: Path) -> None:
    """Exit code 1, and the line names the directory, who we are, whose it is, its mode, and what would help."""
    base = shm_dir / "base"
    base.mkdir(mode=0o755)
    shm_dir.chmod(0o755)
    aeron_parent = shm_dir / "open"
    aeron_parent.mkdir()
    aeron_parent.chmod(0o777)
    arguments = ["--aeron-dir", str(aeron_parent / "aeron"), "--set", f"shm.base_dir={base}"]
    with Process("-c", _AS_NOBODY, str(NOBODY), "driver", *arguments) as process:
        code, output = process.finish()
    assert code == 1, output
    (line,) = output.splitlines()
    assert line.startswith("error: shm.base_dir = ")
    for words in (f"read and write {base}:", f"(uid {NOBODY})", "found owner root:root, mode 0755", "group"):
        assert words in line, line
    assert os.listdir(base) == []
    assert os.listdir(aeron_parent) == [], "its media driver is gone too"
