# SPDX-License-Identifier: Apache-2.0
"""Attaches as producer or consumer beside a duty cycle that must not wait, and tries again until it works.

`Client.producer` and `Client.consumer` wait for the driver's answer; they are called on a thread of their own here.
A failure is logged once for each new reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol

from tensorpool.errors import Closed, TensorPoolError
from tensorpool.logs import get_logger

RETRY_NS: Final = 500_000_000


class Closeable(Protocol):
    def close(self) -> None: ...


class BackgroundAttach[T: Closeable]:
    """Opens a producer or consumer without its caller waiting for it.

    >>> attach = BackgroundAttach(lambda: client.consumer(1000, timeout=1.0), stream=1000)     # doctest: +SKIP
    >>> consumer = attach.poll(now_ns)      # None until there is one     # doctest: +SKIP

    One thread polls; `failure` is why the last attempt failed.
    """

    def __init__(self, open_it: Callable[[], T], *, stream: int, role: str) -> None:
        self._open = open_it
        self._attempt: Future[T] | None = None
        self._retry_ns = 0
        self._log = get_logger("bridge", stream=stream, role=role)
        self.failure: TensorPoolError | None = None

    def poll(self, now_ns: int) -> T | None:
        """What was opened, once; None while nothing is. Raises an error that no further attempt would cure."""
        if self._attempt is None:
            if now_ns >= self._retry_ns:
                self._attempt = self._start()
            return None
        if not self._attempt.done():
            return None
        attempt, self._attempt = self._attempt, None
        try:
            opened = attempt.result()
        except Closed:
            raise
        except TensorPoolError as error:
            self._retry_ns = now_ns + RETRY_NS
            if _kind(error) != _kind(self.failure):
                self._log.warning("not_attached", error=str(error))
            self.failure = error
            return None
        self.failure = None
        return opened

    def close(self) -> None:
        """Cancel; an attempt that still succeeds closes what it opened."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.add_done_callback(_close_result)

    def _start(self) -> Future[T]:
        future: Future[T] = Future()

        def attempt() -> None:
            try:
                opened = self._open()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(opened)

        threading.Thread(target=attempt, name="tensorpool-attach", daemon=True).start()
        return future


def _kind(error: TensorPoolError | None) -> tuple[object, ...]:
    """What makes a reason a new one: not its text, which may contain the age of a lease."""
    return type(error), getattr(error, "code", None)


def _close_result[T: Closeable](attempt: Future[T]) -> None:
    if attempt.exception() is None:
        attempt.result().close()
