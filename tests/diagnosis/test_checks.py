# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks one by one: each says OK where all is well, and names the fault and its remedy where not."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tensorpool as tp
from tensorpool import aeron, shm
from tensorpool.clock import SystemClock
from tensorpool.diagnosis import limits, software
from tensorpool.diagnosis.check_result import Level
from tensorpool.diagnosis.cnc import read_cnc
from tensorpool.diagnosis.directories import check_directories, check_region_files
from tensorpool.diagnosis.driver import check_discovery, check_driver, check_lock
from tensorpool.diagnosis.layouts import check_layouts
from tensorpool.diagnosis.media_driver import check_media_driver
from tensorpool.diagnosis.space import check_aeron_space, check_space
from tensorpool.driver.config import DriverConfig
from tensorpool.shm import locking
from tensorpool.wire import decode
from tensorpool.wire.driver import ResponseCode, ShmDetachRequest, ShmDetachResponse
from tests.diagnosis.test_leftovers import media_driver_folder
from tests.shm.by_hand import NOBODY, mounted, replace_bytes
from tests.support.processes import run_script, wait_until
from tests.support.wire_producer import Endpoints, WireProducer

RING = shm.RingSpec(8, (shm.PoolSpec(1, 4096),))


# --- who is there


def test_a_media_driver_is_alive_dead_silent_or_absent(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """By its file: process and heartbeat; its version by a counter."""
    alive = check_media_driver(shared_media_driver.aeron_dir)
    assert alive.level is Level.OK
    assert f"alive at {shared_media_driver.aeron_dir}, pid {os.getpid()}, last heartbeat" in alive.found
    assert "version=1." in alive.found
    facts = read_cnc(shared_media_driver.aeron_dir)
    assert facts is not None
    assert (facts.is_process_alive, facts.is_silent(60), facts.client_liveness_timeout_s) == (True, False, 5.0)
    absent = check_media_driver(str(shm_dir / "none"))
    assert (absent.level, absent.found) == (Level.FAIL, f"none is at {shm_dir}/none (no cnc.dat)")
    assert absent.remedy.startswith("tensorpool driver")
    gone = media_driver_folder(shm_dir / "gone", 2**31 - 2, age_s=100)
    dead = check_media_driver(str(gone))
    assert dead.level is Level.FAIL
    words = rf"the one at {gone} is dead: pid 2147483646 is gone, last heartbeat 1\d\d\.\d s ago"
    assert re.fullmatch(words, dead.found), dead.found
    (shm_dir / "text").mkdir()
    (shm_dir / "text" / "cnc.dat").write_text("not one")
    assert check_media_driver(str(shm_dir / "text")).level is Level.FAIL


def test_a_stopped_media_driver_is_called_silent(shm_dir: Path) -> None:
    """Its process is there, its heartbeat is not; the remedy names the pid. Nothing waits for it."""
    stopped = media_driver_folder(shm_dir / "stopped", os.getpid(), age_s=7)
    replace_bytes(stopped / "cnc.dat", 32, (2**42).to_bytes(8, "little"))  # started after this process did
    found = check_media_driver(str(stopped))
    assert (found.level, found.remedy.startswith(f"kill -CONT {os.getpid()}")) == (Level.FAIL, True)
    assert "is silent" in found.found


@contextmanager
def saying_no(aeron_dir: str, endpoints: Endpoints) -> Iterator[None]:
    """A driver that refuses to end any lease, and does nothing else."""
    with contextlib.closing(aeron.connect(aeron_dir)) as client:
        requests = client.add_subscription(*endpoints.control)
        said = client.add_publication(*endpoints.control, exclusive=True)
        is_over = threading.Event()

        def answer(data: bytes, _info: aeron.MessageInfo) -> None:
            request = decode(data)
            if isinstance(request, ShmDetachRequest):
                no = ShmDetachResponse(correlation_id=request.correlation_id, code=ResponseCode.REJECTED)
                said.offer(no.encode())

        def serve() -> None:
            while not is_over.wait(0.001):
                requests.poll(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def test_a_driver_is_asked_and_answers_without_any_change(
    shared_media_driver: aeron.MediaDriver, shm_dir: Path
) -> None:
    """A driver says no to an unknown lease, and that is the answer; one that only announces lives; two are wrong."""
    where = shared_media_driver.aeron_dir
    endpoints = Endpoints.unused()
    with WireProducer(shm_dir / "a", where, endpoints=endpoints) as peer:
        settings = peer.settings | {"discovery.enabled": False}
        config = tp.DriverConfig.load(environ={}, overrides=settings)
        silent = check_driver(config, where, timeout_s=2)
        assert (silent.level, silent.found.startswith("announces 1 streams at aeron:ipc")) == (Level.OK, True)
        assert (peer.grants, peer.ended) == ([], [])
        (off,) = check_discovery(config, where)
        assert off.level is Level.WARN
        assert "names cannot be looked up" in off.found
    with saying_no(where, endpoints):
        found = check_driver(config, where, timeout_s=20)
        assert (found.level, found.found.startswith("answers at aeron:ipc")) == (Level.OK, True)
        with saying_no(where, endpoints):
            wait_until(
                lambda: check_driver(config, where, timeout_s=20).found.startswith("2 drivers answer at "),
                "both announces are received",
            )
    silent = check_driver(config, where, timeout_s=0.3)
    assert (silent.level, "no driver answers at aeron:ipc" in silent.found) == (Level.FAIL, True)
    settings = Endpoints.unused().settings | {"shm.base_dir": str(shm_dir)}
    alone = tp.DriverConfig.load(environ={}, overrides=settings)
    (silent,) = check_discovery(alone, where, timeout_s=0.3)
    assert silent.level is Level.FAIL
    assert f"asked {alone.discovery.channel} stream {alone.discovery.stream_id}: no answer" in silent.found


def test_the_lock_names_its_holder_and_is_not_touched(config: DriverConfig) -> None:
    """No driver has run there, one runs, none runs any more."""
    assert "does not exist" in check_lock(config).found
    with shm.EpochTree.open(config.shm.base_dir, clock=SystemClock()):
        assert check_lock(config).found.startswith(f"pid {os.getpid()} holds ")
    assert "no driver that we can see holds" in check_lock(config).found


# --- files


def test_directories_are_shown_with_owner_and_mode(config: DriverConfig, tree: shm.EpochTree, host: Path) -> None:
    """Base, user and namespace; what is in the way is named, with what to type."""
    assert [finding.level for finding in check_directories(config)] == [Level.OK] * 3
    assert check_directories(config)[1].found == f"{os.path.dirname(tree.path)} 2750 root:root; root may write"
    absent = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": str(host / "later")})
    (finding,) = check_directories(absent)
    assert (finding.level, "does not exist yet" in finding.found) == (Level.OK, True)
    os.chown(tree.path, NOBODY, NOBODY)
    assert check_directories(config)[-1].level is Level.WARN
    assert "another user's" in check_directories(config)[-1].found
    (host / "other" / "tensorpool-root").mkdir(parents=True)
    (host / "other" / "tensorpool-root" / "default").symlink_to("/etc")
    linked = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": str(host / "other")})
    assert check_directories(linked)[-1].found.endswith("is a symbolic link")


AS_NOBODY = """
import os, sys
import tensorpool as tp
from tensorpool.diagnosis.directories import check_directories, check_region_files
config = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": sys.argv[1]})
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for finding in (*check_directories(config), *check_region_files(config)):
    print(finding.level, finding.check, finding.found)
"""


def test_another_account_learns_what_it_may_not_read(config: DriverConfig, tree: shm.EpochTree, host: Path) -> None:
    """Region files of a directory that it may enter, and a whole directory that it may not."""
    tree.create(1, 1, RING, 1, reserve_space=False)
    assert [finding.found for finding in check_region_files(config)] == ["1 epochs, all readable"]
    host.chmod(0o755)
    code, output = run_script(AS_NOBODY, config.shm.base_dir)
    assert code == 0
    assert f"WARN region files this process may not read {os.path.dirname(tree.path)}: it runs as nobody" in output
    for path in (os.path.dirname(tree.path), tree.path, f"{tree.path}/1", f"{tree.path}/1/1"):
        os.chmod(path, 0o755)
    code, output = run_script(AS_NOBODY, config.shm.base_dir)
    assert f"FAIL region files this process may not read {tree.path}/1/1/header.ring: it runs as nobody" in output


def test_superblocks_of_the_living_are_compared_with_files_and_names(
    config: DriverConfig, tree: shm.EpochTree, abandoned: Path
) -> None:
    """Another version, another stream, a file that is too short; what the dead left is not looked at."""
    now_ns = SystemClock().monotonic_ns()
    for stream_id in (1, 2, 3):
        tree.create(stream_id, 5, RING, now_ns, reserve_space=False)
    (fine,) = check_layouts(config)
    assert (fine.level, fine.found[:17]) == (Level.OK, "6 living regions,")
    replace_bytes(f"{tree.path}/1/5/header.ring", 8, (2).to_bytes(4, "little"))
    replace_bytes(f"{tree.path}/2/5/1.pool", 20, (9).to_bytes(4, "little"))
    os.truncate(f"{tree.path}/3/5/1.pool", 4096)
    replace_bytes(abandoned / "1" / next((abandoned / "1").iterdir()).name / "header.ring", 8, b"\x07")
    version, stream, short = check_layouts(config)
    assert version.found == f"{tree.path}/1/5/header.ring: layout_version: expected 1, found 2"
    assert version.remedy.startswith("update the older side")
    assert stream.found == f"{tree.path}/2/5/1.pool: stream_id: expected 2, found 9"
    assert short.found.endswith(f"file size: expected at least {64 + 8 * 4096} bytes for 8 slots, found 4096")
    assert {finding.level for finding in (version, stream, short)} == {Level.FAIL}


def test_space_is_the_bill_against_the_mount(shm_dir: Path) -> None:
    """Too small even for one epoch, enough until a producer restarts, enough; Docker's default is recognised."""

    def check(size_mib: int, nslots: int) -> tuple[Level, str, str]:
        with mounted(shm_dir / f"{size_mib}-{nslots}", "tmpfs", f"size={size_mib}m") as mount:
            profile = {"header_nslots": nslots, "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 20}]}
            settings = {"shm.base_dir": str(mount), "profiles.default": profile}
            finding = check_space(tp.DriverConfig.load(environ={}, overrides=settings))
            return finding.level, finding.found, finding.remedy

    level, found, remedy = check(64, 128)
    assert level is Level.FAIL
    assert "has 64 MiB free of 64 MiB" in found
    assert found.endswith("one epoch of a stream need 128 MiB")
    assert remedy.startswith("docker run --shm-size=129m …    (64 MiB is Docker's default; on a host: mount -o remount")
    level, found, remedy = check(100, 64)
    assert (level, remedy.startswith("mount -o remount,size=129m ")) == (Level.WARN, True)
    assert "suffice until a producer restarts" in found
    assert check(100, 16)[0] is Level.OK


def test_aeron_needs_room_for_what_its_sparse_logs_lack(shm_dir: Path) -> None:
    """And for one more client; the remedy is a mount that has both."""
    with mounted(shm_dir / "mount", "tmpfs", "size=200m") as mount:
        log = mount / "aeron" / "publications" / "1.logbuffer"
        log.parent.mkdir(parents=True)
        log.touch()
        os.truncate(log, 100 << 20)
        fine = check_aeron_space(str(mount / "aeron"))
        assert (fine.level, fine.found.endswith("its logs and one more client need 164 MiB")) == (Level.OK, True)
        os.truncate(log, 150 << 20)
        short = check_aeron_space(str(mount / "aeron"))
        assert short.level is Level.WARN
        assert "has 200 MiB free of 200 MiB; one more client needs 64 MiB, and sparse logs 150 MiB" in short.found
        assert short.remedy.startswith("mount -o remount,size=214m ")
        with log.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 130 << 20)
        assert check_aeron_space(str(mount / "aeron")).level is Level.WARN
        assert "sparse logs 20 MiB" in check_aeron_space(str(mount / "aeron")).found


# --- limits and software


def test_limits_are_judged_by_what_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked memory only where it is asked for; small socket buffers with the sysctl to type."""
    plain = DriverConfig.load(environ={})
    assert limits.check_memlock(plain) is None
    locking = DriverConfig.load(environ={}, overrides={"policies.mlock_shm": True})
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64 << 10, 64 << 10))
    monkeypatch.setattr("tensorpool.shm.locking._has_capability", lambda _number: False)
    memlock = limits.check_memlock(locking)
    assert memlock is not None
    assert memlock.found == "`ulimit -l` is 64 KiB, policies.mlock_shm has to lock 145 MiB"
    assert memlock.remedy.startswith("ulimit -l 148485    (a service: LimitMEMLOCK=infinity)")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    files = limits.check_open_files()
    assert (files.level, files.remedy) == (Level.WARN, "ulimit -n 4096")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.check_memlock(locking) is not None
    (tmp_path / "rmem_max").write_text("212992\n")
    (tmp_path / "wmem_max").write_text("8388608\n")
    small = limits.check_socket_buffers(str(tmp_path))
    assert (small.level, small.remedy) == (Level.WARN, "sysctl -w net.core.rmem_max=4194304    (only for a bridge)")
    (tmp_path / "rmem_max").write_text("8388608\n")
    assert limits.check_socket_buffers(str(tmp_path)).level is Level.OK
    assert limits.check_socket_buffers(str(tmp_path / "none")).level is Level.OK


def test_open_files_and_capabilities_of_this_process_are_read() -> None:
    """The real ones, whatever they are."""
    assert limits.check_open_files().check == "open files"
    assert locking.lockable_bytes() in (None, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def test_python_and_aeron_are_reported_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is missing, with what to install."""
    python = software.check_python()
    assert (python.level, f"Python {sys.version.split()[0]}" in python.found) == (Level.OK, True)
    assert software.check_aeron().level is Level.OK
    monkeypatch.setenv("TENSORPOOL_LIBAERON", "/nowhere/libaeron.so")
    # A library that is loaded already stays: what matters is that the answer names where it was looked for.
    assert "/nowhere/libaeron.so" in software.check_aeron().found


def test_java_is_found_by_its_release_file_or_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen or later, wherever JAVA_HOME or the PATH lead."""
    spark = software.check_spark()
    assert (spark.level, spark.found[:8]) == (Level.OK, "pyspark ")

    def home(name: str, *, release: str = "", script: str = "") -> None:
        java = tmp_path / name / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        if release:
            (tmp_path / name / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{release}"\n')
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / name))

    def found() -> tuple[Level, str]:
        java = software.check_java()
        assert java is not None
        return java.level, java.found

    home("new", release="21.0.2")
    assert found() == (Level.OK, f"21.0.2 at {tmp_path}/new/bin/java")
    home("old", release="1.8.0_392")
    assert found() == (Level.WARN, f"{tmp_path}/old/bin/java is 1.8.0_392, Spark needs 17 or later")
    home("asked", script="echo 'openjdk version \"17.0.9\" 2023' >&2")
    assert found() == (Level.OK, f"17.0.9 at {tmp_path}/asked/bin/java")
    home("mute", script="exit 1")
    assert found()[0] is Level.WARN
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    assert found() == (Level.WARN, f"JAVA_HOME is {tmp_path}/none, where none is; Spark needs one")


def test_java_is_not_checked_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how to get it is said."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert software.check_java() is None
    assert software.check_spark().found.endswith('pip install "aeron-tensorpool[spark]"')
