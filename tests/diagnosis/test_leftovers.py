# SPDX-License-Identifier: Apache-2.0
"""Leftovers: what is dead is found and explained; what cannot be proven, or is not ours, is left alone and reported."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tensorpool import shm
from tensorpool.clock import SystemClock
from tensorpool.diagnosis.check_result import Level
from tensorpool.diagnosis.leftovers import check_leftovers, remove, survey_everything
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.shm.leftovers import Survey
from tensorpool.shm.namespace import LOCK_NAME, NamespaceLock, lock_holder
from tests.diagnosis.conftest import LONG_AGO_NS
from tests.shm.by_hand import NOBODY, folder

RING = shm.RingSpec(8, (shm.PoolSpec(1, 4096),))


@pytest.fixture(scope="module")
def gone_pid() -> int:
    """A pid that no process has any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def look(config: DriverConfig) -> Survey:
    return survey_everything(config, f"{config.shm.base_dir}-no-aeron")


def paths_below(path: Path) -> set[str]:
    """Everything but the record of the highest epoch, which the next driver needs."""
    return {str(found) for found in path.rglob("*") if not found.name.startswith("highest-epoch.")}


def media_driver_folder(path: Path, pid: int, *, age_s: float) -> Path:
    """As a media driver leaves it: 1 MiB to the driver, whose trailer holds the last heartbeat."""
    to_driver = (1 << 20) + 768
    data = bytearray(128 + to_driver)
    struct.pack_into("<ii16xqqq", data, 0, 0x200, to_driver, 5_000_000_000, 1_000, pid)
    struct.pack_into("<q", data, 128 + to_driver - 128, int((time.time() - age_s) * 1000))
    (path / "publications").mkdir(parents=True)
    (path / "images").mkdir()
    (path / "publications" / "4.logbuffer").write_bytes(bytes(4096))
    (path / "cnc.dat").write_bytes(data)
    return path


def embedded_folder(path: Path) -> Path:
    """As a killed `tp.local()` leaves it, but for its media driver."""
    path.mkdir(mode=0o700)
    (path / "owner.lock").touch(0o600)
    (path / "regions").mkdir()
    return path


def test_what_is_dead_is_explained_and_removed(config: DriverConfig, abandoned: Path) -> None:
    """Each epoch with its reasons; after the removal the namespace is empty, and a second look finds nothing."""
    found = look(config)
    assert [leftover.kind for leftover in found.dead] == ["epoch", "epoch"]
    for leftover in found.dead:
        lock, process, stamp = leftover.why
        assert lock == "no driver holds its namespace's lock"
        assert process.startswith("pid ")
        assert process.endswith("which made it, is gone")
        assert re.fullmatch(r"last sign of life \d+ s ago", stamp)
    (finding,) = check_leftovers(found)
    assert finding.level is Level.WARN
    assert "2 directories of dead processes hold" in finding.found
    assert finding.remedy == "tensorpool doctor --gc"
    outcomes = list(remove(found, config))
    assert [outcome.is_removed for outcome in outcomes] == [True, True]
    assert paths_below(abandoned) == set()
    assert list(abandoned.glob("highest-epoch.*")), "the next driver starts above it"
    assert look(config) == Survey()
    assert check_leftovers(look(config))[0].level is Level.OK


def test_a_look_changes_nothing(config: DriverConfig, abandoned: Path, host: Path) -> None:
    """Neither files nor their times; and it takes no lock."""
    before = {path: path.stat().st_mtime_ns for path in host.rglob("*")}
    look(config)
    assert {path: path.stat().st_mtime_ns for path in host.rglob("*")} == before


def test_what_lives_is_counted_and_left(config: DriverConfig, tree: shm.EpochTree, abandoned: Path) -> None:
    """A driver with a lock, though its stamps are stale, keeps its epochs."""
    clock = SystemClock()
    ring = tree.create(7, 1, RING, clock.monotonic_ns(), reserve_space=False)
    ring.refresh_activity(LONG_AGO_NS)
    found = look(config)
    assert len(found.dead) == 2
    assert found.living == 1
    list(remove(found, config))
    assert os.path.exists(f"{tree.path}/7/1/header.ring")


@pytest.mark.parametrize("kind", ["file", "link", "folder", "foreign"])
def test_an_epoch_that_holds_something_else_stays_whole_and_is_reported(
    config: DriverConfig, abandoned: Path, kind: str
) -> None:
    """A file of another name, a link, a directory, another user's file: nothing of that epoch is touched."""
    epoch = next(abandoned.glob("1/*"))
    stranger = epoch / ("9.pool" if kind == "foreign" else "notes")
    if kind == "link":
        stranger.symlink_to("/etc/passwd")
    elif kind == "folder":
        stranger.mkdir()
    else:
        stranger.touch()
    if kind == "foreign":
        os.chown(stranger, NOBODY, NOBODY)
    before = paths_below(epoch)
    found = look(config)
    assert [kept.path for kept in found.kept] == [str(epoch)]
    assert f"not ours or no file of its kind: {stranger.name}; look at it" in found.kept[0].reason
    assert [outcome.is_removed for outcome in remove(found, config)] == [True]
    assert paths_below(epoch) == before
    assert not list(abandoned.glob("2/*"))


def test_another_users_leftovers_are_reported_and_left(config: DriverConfig, abandoned: Path) -> None:
    """Root could remove them, and does not."""
    for path in (abandoned, *abandoned.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    found = look(config)
    assert found.dead == ()
    assert found.kept[0].reason == "2 dead epochs belong to nobody; let nobody run `tensorpool doctor --gc`"
    (finding,) = check_leftovers(found)
    assert (finding.level, finding.found) == (Level.WARN, f"{abandoned}: {found.kept[0].reason}")


def test_what_came_to_life_or_went_after_the_look_is_left(config: DriverConfig, abandoned: Path) -> None:
    """A driver that started in between has the namespace; who removed it in between has done the work."""
    found = look(config)
    with shm.EpochTree(str(abandoned), clock=SystemClock()):
        outcomes = list(remove(found, config))
        assert [(outcome.is_removed, outcome.is_failed) for outcome in outcomes] == [(False, False)] * 2
        assert f"pid {os.getpid()} holds" in outcomes[0].reason
    assert all(os.path.isdir(leftover.path) for leftover in found.dead)
    list(remove(found, config))
    assert {outcome.reason for outcome in remove(found, config)} == {"another process removed it meanwhile"}


def test_what_cannot_be_removed_is_a_failure(config: DriverConfig, abandoned: Path, host: Path, gone_pid: int) -> None:
    """Something that was laid into it after the look: it stays whole, and the reason names it."""
    media = media_driver_folder(host / "aeron-dead", gone_pid, age_s=3600)
    found = look(config)
    epoch = next(abandoned.glob("1/*"))
    (epoch / "notes").touch()
    (media / "notes").touch()
    failed = [outcome for outcome in remove(found, config) if outcome.is_failed]
    assert [outcome.leftover.path for outcome in failed] == [str(epoch), str(media)]
    assert all("not ours or no file of its kind: notes; look at it" in outcome.reason for outcome in failed)
    assert (epoch / "header.ring").exists()
    assert (media / "cnc.dat").exists()


def test_an_unfinished_epoch_goes_with_the_driver_that_began_it(config: DriverConfig, gone_pid: int) -> None:
    """Without a superblock the lock file says whose it was; without either it is unknown."""
    namespace = Path(shm.namespace_path(config.shm.base_dir, "half"))
    epoch = namespace / "5" / "1"
    epoch.mkdir(parents=True)
    (epoch / "1.pool").write_bytes(bytes(64))
    found = look(config)
    assert (found.dead, len(found.kept)) == ((), 1)
    assert "1 epochs were never finished, and nothing says whose they are" in found.kept[0].reason
    (namespace / LOCK_NAME).write_text(f"{gone_pid}\n")
    found = look(config)
    assert [(leftover.kind, leftover.path) for leftover in found.dead] == [("unfinished epoch", str(epoch))]
    assert [outcome.is_removed for outcome in remove(found, config)] == [True]
    assert paths_below(namespace) == set()


def test_an_interrupted_removal_is_finished(config: DriverConfig, abandoned: Path) -> None:
    """What was renamed and not deleted goes too, also where the same number is there again."""
    epoch = next(abandoned.glob("1/*"))
    retired = epoch.parent / f".{epoch.name}.retired"
    retired.mkdir()
    (retired / "1.pool").touch()
    found = look(config)
    assert "retired epoch" in {leftover.kind for leftover in found.dead}
    list(remove(found, config))
    assert paths_below(abandoned) == set()


def test_a_starting_driver_waits_for_a_sweeper_and_not_for_a_driver(shm_dir: Path) -> None:
    """The moment that a removal takes must not fail a start; a sweeper itself never waits."""
    with folder(shm_dir) as fd:
        sweeper = NamespaceLock(fd, str(shm_dir), is_sweeper=True)
        with pytest.raises(ConfigError, match=r"pid \d+ \(removing leftovers\) holds"):
            NamespaceLock(fd, str(shm_dir), is_sweeper=True)
        taken: list[NamespaceLock] = []
        driver = threading.Thread(target=lambda: taken.append(NamespaceLock(fd, str(shm_dir))))
        driver.start()
        assert taken == []
        assert lock_holder(str(shm_dir / LOCK_NAME)) == os.getpid()
        sweeper.release()
        driver.join()
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} holds"):
            NamespaceLock(fd, str(shm_dir))
        taken[0].release()
    assert lock_holder(str(shm_dir / LOCK_NAME)) is None


def test_a_dead_embedded_driver_goes_whole(config: DriverConfig, host: Path, gone_pid: int) -> None:
    """Its lock is free, its media driver's process gone and silent: the directory goes with all that is in it."""
    path = embedded_folder(host / "tensorpool-local-dead")
    media_driver_folder(path / "aeron", gone_pid, age_s=3600)
    found = look(config)
    assert [(leftover.kind, leftover.path) for leftover in found.dead] == [("embedded driver", str(path))]
    assert [outcome.is_removed for outcome in remove(found, config)] == [True]
    assert not list(host.glob("tensorpool-local-*"))


@pytest.mark.parametrize("sign", ["lock", "heartbeat", "process", "stamp"])
def test_a_sign_of_life_protects_an_embedded_driver(config: DriverConfig, host: Path, gone_pid: int, sign: str) -> None:
    """Any of them: its lock is held, its media driver beats or runs, its epochs are fresh."""
    path = embedded_folder(host / "tensorpool-local-live")
    age_s = 1 if sign == "heartbeat" else 3600
    media_driver_folder(path / "aeron", os.getpid() if sign == "process" else gone_pid, age_s=age_s)
    if sign == "process":  # a media driver that started before this process would be another's
        with open(path / "aeron" / "cnc.dat", "r+b") as cnc:
            cnc.seek(32)
            cnc.write(struct.pack("<q", int(time.time() * 1000)))
    lock = os.open(path / "owner.lock", os.O_RDWR)
    if sign == "lock":
        fcntl.flock(lock, fcntl.LOCK_EX)
    if sign == "stamp":
        with shm.EpochTree.open(str(path / "regions"), clock=SystemClock()) as tree:
            tree.create(1, 1, RING, SystemClock().monotonic_ns(), reserve_space=False)
    found = look(config)
    assert (found.dead, found.living) == ((), 1)
    os.close(lock)


def test_embedded_directories_without_an_owner_are_reported(config: DriverConfig, host: Path) -> None:
    """One without a lock file, one with a stranger in it, a link, and a start that never got to its lock."""
    embedded_folder(host / "tensorpool-local-a").joinpath("owner.lock").unlink()
    embedded_folder(host / "tensorpool-local-b").joinpath("diary.txt").touch()
    (host / "tensorpool-local-c").symlink_to(host)
    (host / "tensorpool-new-d").mkdir()
    os.utime(host / "tensorpool-new-d", (0, 0))
    (host / "tensorpool-new-e").mkdir()  # just now
    before = paths_below(host)
    found = look(config)
    assert (found.dead, found.living) == ((), 1)
    reasons = {os.path.basename(kept.path): kept.reason for kept in found.kept}
    assert "without owner.lock nothing says whose it is" in reasons["tensorpool-local-a"]
    assert "diary.txt" in reasons["tensorpool-local-b"]
    assert reasons["tensorpool-local-c"] == "it is a link or no directory"
    assert "a start that was interrupted" in reasons["tensorpool-new-d"]
    list(remove(found, config))
    assert paths_below(host) == before


def test_media_drivers_differ_by_process_and_heartbeat(config: DriverConfig, host: Path, gone_pid: int) -> None:
    """Gone and silent is dead; a heartbeat protects, for it may be another container's; a stranger inside too."""
    dead = media_driver_folder(host / "aeron-dead", gone_pid, age_s=3600)
    media_driver_folder(host / "aeron-beats", gone_pid, age_s=5)
    media_driver_folder(host / "aeron-kept", gone_pid, age_s=3600).joinpath("archive").mkdir()
    (host / "aeron-empty").mkdir()
    found = look(config)
    assert [(leftover.kind, leftover.path) for leftover in found.dead] == [("media driver", str(dead))]
    process, heartbeat = found.dead[0].why
    assert process == f"pid {gone_pid}, which ran it, is gone"
    assert re.fullmatch(r"last heartbeat 36\d\d s ago", heartbeat)
    assert found.living == 1
    assert {os.path.basename(kept.path) for kept in found.kept} == {"aeron-kept", "aeron-empty"}
    assert [outcome.is_removed for outcome in remove(found, config)] == [True]
    assert {path.name for path in host.glob("aeron*")} == {"aeron-beats", "aeron-kept", "aeron-empty"}
    assert [outcome.reason for outcome in remove(found, config)] == ["another process removed it meanwhile"]


def test_a_half_removed_directory_is_finished_later(config: DriverConfig, host: Path, gone_pid: int) -> None:
    """What tells whose it is goes last, so that the next one can go on."""
    media_driver_folder(host / "aeron-x.retired-77", gone_pid, age_s=3600)
    assert [outcome.is_removed for outcome in remove(look(config), config)] == [True]
    assert not list(host.glob("aeron*"))


def test_a_media_driver_that_came_back_is_left(config: DriverConfig, host: Path, gone_pid: int) -> None:
    """Between the survey and the removal a process started at the same directory."""
    path = media_driver_folder(host / "aeron-x", gone_pid, age_s=3600)
    found = look(config)
    with open(path / "cnc.dat", "r+b") as cnc:
        cnc.seek(128 + (1 << 20) + 768 - 128)
        cnc.write(struct.pack("<q", int(time.time() * 1000)))
    (outcome,) = remove(found, config)
    assert outcome.reason == "it came to life meanwhile"
    assert (path / "cnc.dat").exists()
