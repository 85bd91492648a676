# SPDX-License-Identifier: Apache-2.0
"""Liveness: a pid counts only for the process that had it, a stamp only if it lies in the past."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tensorpool.shm import Liveness, PoolSpec, RingSpec, liveness_of
from tensorpool.shm.liveness import is_process_alive
from tests.support.processes import Process, wait_until

HEADER = RingSpec(4, (PoolSpec(1, 64),)).regions(1, 1)[0]
WALL_NS = 1_800_000_000_000_000_000
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def test_this_process_is_alive() -> None:
    """A region that we stamp now is ours."""
    now = time.monotonic_ns()
    assert liveness_of(HEADER.superblock(os.getpid(), now), now + 5, time.time_ns()) == Liveness(os.getpid(), True, 5)


def test_a_process_that_started_later_is_another_one() -> None:
    """The number was given away again: its first owner is dead."""
    assert not is_process_alive(os.getpid(), since_ns=1)


def test_a_machine_that_slept_makes_no_process_look_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's start time counts the sleep, our stamps do not."""
    now = time.monotonic_ns()
    hour = 3_600_000_000_000
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: now + hour)
    assert is_process_alive(os.getpid(), now - hour)


def test_a_killed_process_is_dead_before_and_after_it_is_reaped() -> None:
    """A zombie writes nothing any more."""
    with Process("-c", SLEEPER) as process:
        assert process.read_line() == "up"
        started = time.monotonic_ns()
        assert is_process_alive(process.pid, started)
        process.send(signal.SIGKILL)
        wait_until(lambda: not is_process_alive(process.pid, started), "the zombie is dead")
        assert os.path.exists(f"/proc/{process.pid}")
        process.finish()
    assert not is_process_alive(process.pid, started)


def test_a_stopped_process_is_alive() -> None:
    """SIGSTOP is no death."""
    with Process("-c", SLEEPER) as process:
        assert process.read_line() == "up"
        started = time.monotonic_ns()
        process.send(signal.SIGSTOP)
        assert is_process_alive(process.pid, started)


@pytest.mark.parametrize("pid", [0, 2**31, 2**63, 2**64 - 1])
def test_numbers_that_are_no_pid_are_dead(pid: int) -> None:
    """Superblocks may hold anything; 0 would mean our own process group."""
    assert not is_process_alive(pid, time.monotonic_ns())


def test_without_a_readable_proc_an_existing_pid_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """In doubt nothing is deleted."""

    def refuse(*_: object, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert is_process_alive(os.getpid(), since_ns=1)


def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """EPERM means that there is one."""

    def refuse(pid: int, number: int) -> None:
        assert number == 0
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_process_alive(os.getpid(), time.monotonic_ns())


def test_a_stamp_in_the_future_is_stale() -> None:
    """It was written before the last boot, by a clock that has started anew."""
    facts = liveness_of(HEADER.superblock(os.getpid(), 1_000), 999, WALL_NS)
    assert facts.activity_age_ns is None
    assert not facts.is_active(window_ns=10**18)


def test_activity_is_judged_against_a_window() -> None:
    """As old as the window is still active."""
    facts = liveness_of(HEADER.superblock(os.getpid(), 1_000), 1_300, WALL_NS)
    assert facts.is_active(window_ns=300)
    assert not facts.is_active(window_ns=299)


def test_a_stamp_of_the_wall_clock_is_compared_with_the_wall_clock() -> None:
    """REALTIME_SYNCED drivers stamp so: fresh is fresh, old is old, and a clock set back a little changes nothing."""
    stamped = HEADER.superblock(os.getpid(), WALL_NS)
    for elapsed_ns, is_active in ((5, True), (300, True), (301, False), (-300, True), (-301, False)):
        facts = liveness_of(stamped, 10_000, WALL_NS + elapsed_ns)
        assert facts.activity_age_ns == abs(elapsed_ns)
        assert facts.is_active(window_ns=300) is is_active


def test_an_owner_that_was_stamped_by_the_wall_clock_is_distinguished_from_a_later_process() -> None:
    """The start by the wall clock is compared with that of the process that has the number now."""
    now, wall = time.monotonic_ns(), time.time_ns()
    assert liveness_of(HEADER.superblock(os.getpid(), wall), now, wall).is_process_alive
    hour = 3_600_000_000_000
    before_it_started = HEADER.superblock(os.getpid(), wall - hour)
    assert not liveness_of(before_it_started, now, wall).is_process_alive
