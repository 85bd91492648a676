# SPDX-License-Identifier: Apache-2.0
"""Agents: the duty cycle, its errors, its end, and how runners idle."""

from __future__ import annotations

import threading
import time

import pytest

from tensorpool import aeron
from tensorpool.errors import LocalProtocolError
from tests.support.processes import wait_until


class Recorder:
    """An agent that notes what happens to it and on which thread, and works through a script of turns."""

    role_name = "recorder"

    def __init__(self, *turns: int | Exception) -> None:
        self.turns = list(turns)
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def note(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.get_ident())

    def on_start(self) -> None:
        self.note("start")

    def do_work(self) -> int:
        if not self.turns:
            return 0
        self.note("work")
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn

    def on_close(self) -> None:
        self.note("close")


class CountingIdle:
    def __init__(self) -> None:
        self.work: list[int] = []

    def idle(self, work_count: int) -> None:
        if len(self.work) < 100:
            self.work.append(work_count)


def test_a_runner_starts_works_and_closes_on_its_own_thread() -> None:
    """on_start, every turn and on_close run on one thread that is not the caller's, and idling sees the true work."""
    agent, idle = Recorder(3, 0, 2), CountingIdle()
    with aeron.AgentRunner(agent, idle) as runner:
        wait_until(lambda: not agent.turns and len(idle.work) > 3, "the script is worked through")
        assert runner.is_running
    assert not runner.is_running
    assert agent.calls == ["start", "work", "work", "work", "close"]
    assert agent.threads != {threading.get_ident()}
    assert len(agent.threads) == 1
    assert idle.work[:4] == [3, 0, 2, 0]


def test_an_error_goes_to_the_handler_and_the_agent_goes_on() -> None:
    """With on_error, an exception of a turn is reported once and the next turn follows."""
    errors: list[Exception] = []
    agent = Recorder(ValueError("first"), 1)
    with aeron.AgentRunner(agent, on_error=errors.append):
        wait_until(lambda: not agent.turns, "the turn after the error")
    assert [str(error) for error in errors] == ["first"]
    assert agent.calls == ["start", "work", "work", "close"]


def test_an_error_without_a_handler_ends_the_agent_and_reaches_close() -> None:
    """Nothing is swallowed: without on_error the agent ends in order and close raises the exception, once."""
    agent = Recorder(ValueError("fatal"), 1)
    runner = aeron.AgentRunner(agent).start()
    wait_until(lambda: not runner.is_running, "the agent ended")
    assert agent.calls == ["start", "work", "close"]
    with pytest.raises(ValueError, match="fatal"):
        runner.close()
    runner.close()


def test_a_failing_start_is_raised_by_start() -> None:
    """An agent that cannot start says so to the one who started it."""
    agent = Recorder()
    agent.on_start = lambda: (_ for _ in ()).throw(OSError("no disk"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no disk"):
        aeron.AgentRunner(agent).start()


def test_termination_from_inside_closes_in_order() -> None:
    """AgentTerminated ends the agent as close() would, without an error."""
    agent = Recorder(1, aeron.AgentTerminated(), 1)
    runner = aeron.AgentRunner(agent).start()
    wait_until(lambda: not runner.is_running, "the agent ended itself")
    runner.close()
    assert agent.calls == ["start", "work", "work", "close"]


def test_a_closed_runner_cannot_be_started() -> None:
    """Runners are for one life."""
    runner = aeron.AgentRunner(Recorder())
    runner.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        runner.start()


def test_an_invoker_turns_the_agent_on_the_callers_thread() -> None:
    """invoke() does one turn, returns its work, raises its error, and does nothing after close."""
    agent = Recorder(4, RuntimeError("mine"))
    invoker = aeron.AgentInvoker(agent)
    assert invoker.invoke() == 4
    with pytest.raises(RuntimeError, match="mine"):
        invoker.invoke()
    invoker.close()
    invoker.close()
    assert invoker.invoke() == 0
    assert agent.calls == ["start", "work", "work", "close"]
    assert agent.threads == {threading.get_ident()}


def test_backoff_parks_longer_and_longer_and_starts_over_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle turns yield, then park from the shortest to the longest time; work makes it prompt again."""
    parks: list[int] = []
    ours, sleep = threading.current_thread(), time.sleep

    def park(seconds: float) -> None:
        if threading.current_thread() is ours:
            parks.append(round(seconds * 1e9))
        else:
            sleep(seconds)  # an agent of another test's

    monkeypatch.setattr("time.sleep", park)
    idle = aeron.BackoffIdle(max_yields=2, min_park_ns=100, max_park_ns=350)
    for _ in range(6):
        idle.idle(0)
    assert parks == [100, 200, 350, 350]
    idle.idle(1)
    for _ in range(3):
        idle.idle(0)
    assert parks[4:] == [100]
