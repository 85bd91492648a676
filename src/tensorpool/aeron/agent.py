# SPDX-License-Identifier: Apache-2.0
"""Agents and the duty cycle that turns them.

An agent's `do_work` never blocks and returns the work it really did; 0 lets the runner idle. The runner owns the thread
and the idling, an invoker leaves both to the caller.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from tensorpool.aeron import library
from tensorpool.errors import LocalProtocolError


class Agent(Protocol):
    """Something with a duty cycle."""

    @property
    def role_name(self) -> str: ...
    def on_start(self) -> None:
        """Called once, on the agent's thread, before the first turn."""

    def do_work(self) -> int:
        """One turn: never blocks, returns the work done."""

    def on_close(self) -> None:
        """Called once, on the agent's thread, after the last turn."""


class AgentTerminated(Exception):
    """Raised by `do_work` to end the agent in order."""


class IdleStrategy(Protocol):
    """What to do with a turn that found no work."""

    def idle(self, work_count: int) -> None:
        """Wait a little if `work_count` is 0, else be ready for more."""


class BackoffIdle:
    """Yields a few times, then sleeps, twice as long each time: prompt under load, nearly free when idle."""

    def __init__(self, *, max_yields: int = 10, min_park_ns: int = 50_000, max_park_ns: int = 2_000_000) -> None:
        self._max_yields = max_yields
        self._min_park_ns = min_park_ns
        self._max_park_ns = max_park_ns
        self._yields = 0
        self._park_ns = min_park_ns

    def idle(self, work_count: int) -> None:
        if work_count > 0:
            self._yields = 0
            self._park_ns = self._min_park_ns
        elif self._yields < self._max_yields:
            self._yields += 1
            os.sched_yield()
        else:
            time.sleep(self._park_ns / 1e9)
            self._park_ns = min(2 * self._park_ns, self._max_park_ns)


class NappingIdle:
    """Calls `nap(nanoseconds)` after every turn that found nothing, which sleeps until there is something to do."""

    def __init__(self, nap: Callable[[int], object], longest_ns: int) -> None:
        self._nap = nap
        self._longest_ns = longest_ns

    def idle(self, work_count: int) -> None:
        if work_count == 0:
            self._nap(self._longest_ns)


class SleepingIdle:
    """Sleeps the same time at every idle turn."""

    def __init__(self, park_ns: int = 1_000_000) -> None:
        self._park_ns = park_ns

    def idle(self, work_count: int) -> None:
        if work_count == 0:
            time.sleep(self._park_ns / 1e9)


class YieldingIdle:
    """Gives the core to other threads and comes back at once: lowest latency, one busy core."""

    def idle(self, work_count: int) -> None:
        if work_count == 0:
            os.sched_yield()


class AgentInvoker:
    """Turns an agent on the caller's thread.

    >>> invoker = AgentInvoker(agent)    # doctest: +SKIP
    >>> while running:                   # doctest: +SKIP
    ...     invoker.invoke()
    """

    def __init__(self, agent: Agent, *, on_error: Callable[[Exception], None] | None = None) -> None:
        self._agent = agent
        self._on_error = on_error
        self._started = False
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def start(self) -> None:
        """Call the agent's `on_start`, once."""
        if not self._started:
            self._agent.on_start()
            self._started = True

    def invoke(self) -> int:
        """One turn. An exception goes to `on_error`, or to the caller where there is none."""
        if self._closed:
            return 0
        self.start()
        try:
            return self._agent.do_work()
        except AgentTerminated:
            self.close()
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
        return 0

    def close(self) -> None:
        """Call the agent's `on_close`, once, if it was started."""
        if not self._closed:
            self._closed = True
            if self._started:
                self._agent.on_close()


class AgentRunner:
    """Turns an agent on a thread of its own until closed.

    >>> with AgentRunner(agent, BackoffIdle()):     # doctest: +SKIP
    ...     ...

    An exception of a turn goes to `on_error` and the agent goes on; without `on_error` it ends the agent, and `close`
    raises it.
    """

    def __init__(
        self,
        agent: Agent,
        idle: IdleStrategy | None = None,
        *,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._invoker = AgentInvoker(agent, on_error=on_error)
        self._idle = idle or BackoffIdle()
        self._running = True
        self._start_failure: BaseException | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=agent.role_name, daemon=True)
        self._pid = os.getpid()
        self._turned_ns = time.monotonic_ns()

    def start(self) -> Self:
        """Start the thread and wait until the agent's `on_start` has returned; its exception is raised here."""
        if not self._running:
            raise LocalProtocolError(f"agent {self._thread.name} was closed; make a new runner")
        # First: a signal's exception may leave `Thread.start` when the thread is there.
        library.close_at_exit(self, library.ClosingTurn.AGENT)
        self._thread.start()
        self._ready.wait()
        if self._start_failure is not None:
            self._thread.join()
            raise self._start_failure
        return self

    @property
    def is_running(self) -> bool:
        """Whether the agent still turns."""
        return self._thread.is_alive()

    @property
    def silent_ns(self) -> int:
        """How long ago the last turn ended: for a watchdog."""
        return time.monotonic_ns() - self._turned_ns

    def close(self) -> None:
        """Let the current turn end, have the agent closed on its thread, and wait for that."""
        self._running = False
        if self._pid != os.getpid() or self._thread is threading.current_thread():
            return  # a forked child has no such thread; an agent that closes itself is closed after its turn
        if self._thread.ident is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        if (
            self._running
        ):  # else closed before it began: the interpreter may be ending, and then no thread may be in C++
            self._turn()
        self._ready.set()

    def _turn(self) -> None:
        # Exceptions are kept for start() and close(): a thread has no caller.
        try:
            self._invoker.start()
        except BaseException as error:
            self._start_failure = error
            return
        finally:
            self._ready.set()
        try:
            while self._running and not self._invoker.is_closed:
                work = self._invoker.invoke()
                self._turned_ns = time.monotonic_ns()
                self._idle.idle(work)
        except BaseException as error:
            self._failure = error
        try:
            self._invoker.close()
        except BaseException as error:
            self._failure = self._failure or error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
