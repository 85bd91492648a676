# SPDX-License-Identifier: Apache-2.0
"""Consumers for asyncio: the event loop never blocks, and a cancelled loop leaves neither a thread nor a lease.

One thread per client sleeps in shared memory on behalf of all its consumers; frames are taken on the loop's own thread.
Attaching and closing, which wait for a driver's answer, each have a thread of their own while they last.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tensorpool import _core
from tensorpool.client.arguments import seconds
from tensorpool.client.consumer import SLICE_NS, Consumer
from tensorpool.client.frame import Frame
from tensorpool.client.joining import Join, Joinable, JoinStats, join
from tensorpool.client.stream_reader import ConsumerStats
from tensorpool.errors import Closed, LocalProtocolError

if TYPE_CHECKING:
    from tensorpool.client.client import Client

PROGRESS_SLICE_S: Final = 0.01  # how often partial frames are looked for


class AsyncClient:
    """The asyncio face of a `Client`."""

    def __init__(self, client: Client, waiter: Waiter) -> None:
        self._client = client
        self._waiter = waiter

    def consumer(self, stream: int | str, **options: Any) -> AsyncConsumer:
        """Like `Client.consumer`; attaches when it is entered or first awaited.

        >>> async for frame in client.aio.consumer("camera/front"):     # doctest: +SKIP
        ...     await show(frame.copy())
        """
        return AsyncConsumer(self._client, self._waiter, stream, options)

    def join(self, consumers: Iterable[AsyncConsumer], **options: Any) -> AsyncJoin:
        """Like `tensorpool.join`, of consumers that are made here; attaches them when it is entered or first awaited.

        >>> eyes = [client.aio.consumer("eye/left"), client.aio.consumer("eye/right")]     # doctest: +SKIP
        >>> async for left, right in client.aio.join(eyes, by="seq"):                      # doctest: +SKIP
        ...     await show(left.array, right.array)

        Raises LocalProtocolError where it is awaited first, for what `tensorpool.join` refuses.
        """
        return AsyncJoin(consumers, options)


class _Received[T](ABC):
    """What is received one by one: attached when it is entered, closed when it is left."""

    _is_closed = False

    @abstractmethod
    async def poll(self, timeout: float | None = 0.0) -> T | None: ...
    @abstractmethod
    async def close(self) -> None: ...
    @abstractmethod
    async def _attached(self) -> object: ...

    async def __aenter__(self) -> Self:
        await self._attached()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[T]:
        try:
            while not self._is_closed:
                found = await self.poll(None)
                if found is None:
                    return
                yield found
        finally:
            if not self._is_closed:
                await self.close()


class AsyncConsumer(_Received[Frame]):
    """Receives the frames of one stream inside an event loop."""

    def __init__(self, client: Client, waiter: Waiter, stream: int | str, options: dict[str, Any]) -> None:
        self._client = client
        self._waiter = waiter
        self._stream = stream
        self._options = options
        self._consumer: Consumer | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._leave: Callable[[], object] = lambda: None
        self._slice_s = None if options.get("on_progress") is None else PROGRESS_SLICE_S
        self._attaching = asyncio.Lock()
        self._pid = os.getpid()

    @property
    def consumer(self) -> Consumer:
        """The consumer behind it, for its `stats`, `metadata` and the like. Raises Closed before the first await."""
        if self._consumer is None:
            raise Closed("the consumer is not attached; enter it with `async with`, or await poll() first")
        return self._consumer

    @property
    def stats(self) -> ConsumerStats:
        """What became of the frames so far. Raises Closed before the first await."""
        return self.consumer.stats

    async def poll(self, timeout: float | None = 0.0) -> Frame | None:
        """The next frame, waiting up to `timeout` seconds (None: as long as it takes); None when there is none."""
        consumer = await self._attached()
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + seconds("timeout", timeout)
        await self._settled()
        while not self._is_closed:
            frame = consumer.poll()
            if frame is not None:
                await self._described(frame)
                return frame
            left = self._slice_s if deadline is None else deadline - loop.time()
            if consumer.is_closed or (left is not None and left <= 0):
                return None
            await asyncio.wait([self._start_waiting(loop)], timeout=left if self._slice_s is None else self._slice_s)
            await self._settled()
        return None

    async def latest(self) -> Frame | None:
        """The newest frame, received before or not; None when there is none yet."""
        consumer = await self._attached()
        await self._settled()
        frame = consumer.latest()
        if frame is not None:
            await self._described(frame)
        return frame

    async def close(self) -> None:
        """Give the lease back. In a forked child there is none."""
        self._is_closed = True
        if self._consumer is not None and os.getpid() == self._pid:
            self._leave()
            await _on_thread(self._consumer.close)

    async def _described(self, frame: Frame) -> None:
        """Have a thread wait for metadata that a frame's dtype depends on: `frame.array` must not block the loop."""
        mapped, slot = frame._mapped, frame._slot
        if not mapped.is_described(slot):
            await _on_thread(lambda: mapped.carried(slot))

    def _start_waiting(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future that is done when there is something to poll; `_settled` before the next poll."""
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting = waiting

        def on_done() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(waiting.set_result, None)

        self._waiter.wait_for(self.consumer, on_done)
        return waiting

    async def _settled(self) -> None:
        """One thread polls a consumer: end a wait that timed out, or that a cancelled caller left behind."""
        while self._waiting is not None and not self._waiting.done():
            assert self._consumer is not None
            self._waiter.withdraw(self._consumer)
            await asyncio.wait([self._waiting])

    async def _attached(self) -> Consumer:
        async with self._attaching:  # a second caller finds what the first has attached
            if self._is_closed:
                raise Closed("the consumer is closed")
            if self._consumer is None:
                self._consumer = await self._attach()
                self._waiter.join()
                self._leave = weakref.finalize(self, self._waiter.leave)
            self._consumer._session.check_process()
            return self._consumer

    async def _attach(self) -> Consumer:
        attaching = _start_thread(self._open)
        try:
            return await asyncio.shield(asyncio.wrap_future(attaching))
        except asyncio.CancelledError:
            attaching.add_done_callback(_close_late)
            self._is_closed = True
            raise

    def _open(self) -> Consumer:
        consumer = self._client.consumer(self._stream, **self._options)
        consumer.is_awaited = True
        return consumer


class AsyncJoin(_Received[tuple[Joinable, ...]]):
    """The frames of several consumers that belong together, inside an event loop. Closes the consumers with itself."""

    def __init__(self, consumers: Iterable[AsyncConsumer], options: dict[str, Any]) -> None:
        self._consumers: Final = list(consumers)
        if not all(isinstance(one, AsyncConsumer) for one in self._consumers):
            raise LocalProtocolError("join: expected consumers of client.aio")
        self._options = options
        self._join: Join | None = None

    @property
    def stats(self) -> JoinStats:
        """What became of the frames so far. Raises Closed before the first await."""
        if self._join is None:
            raise Closed("the consumers are not attached; enter the join with `async with`, or await poll() first")
        return self._join.stats

    async def poll(self, timeout: float | None = 0.0) -> tuple[Joinable, ...] | None:
        """The next tuple, waiting up to `timeout` seconds (None: as long as it takes); None when there is none.

        Views in it are intact when it is returned; as of every frame, ask `is_intact` after reading, or copy.
        """
        joining = await self._attached()
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + seconds("timeout", timeout)
        await self._settled()
        while not self._is_closed:
            has_more = joining.receive()
            found = joining.take()
            if found is not None:
                for consumer, frame in zip(self._consumers, found, strict=True):
                    if isinstance(frame, Frame):
                        await consumer._described(frame)
                return found
            if has_more:
                await asyncio.sleep(0)  # streams that bring frames faster than we join them do not stop the loop
                continue
            open_ones = [one for one in self._consumers if not one.consumer.is_closed]
            left = None if deadline is None else deadline - loop.time()
            if not open_ones or (left is not None and left <= 0):
                return None
            slice_s = joining.wait_at_most(SLICE_NS / 1e9 if left is None else left)
            waiting = [one._start_waiting(loop) for one in open_ones]
            await asyncio.wait(waiting, timeout=slice_s, return_when=asyncio.FIRST_COMPLETED)
            await self._settled()
        return None

    async def close(self) -> None:
        """Give the leases back."""
        self._is_closed = True
        await asyncio.gather(*(one.close() for one in self._consumers))

    async def _attached(self) -> Join:
        if self._is_closed:
            raise Closed("the join is closed")
        if self._join is None:
            try:
                attached = await asyncio.gather(*(one._attached() for one in self._consumers), return_exceptions=True)
                for result in attached:
                    if isinstance(result, BaseException):
                        raise result
                self._join = join([one.consumer for one in self._consumers], **self._options)
            except BaseException:
                await self.close()
                raise
        return self._join

    async def _settled(self) -> None:
        for one in self._consumers:
            await one._settled()


class Waiter:
    """Waits on one thread for the consumers of all event loops of a client.

    A turn waits for all of them at once. It ends when one of them has a frame, when the bell rings because another one
    came or is withdrawn, and now and then, so that the thread does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a consumer that is collected leaves at any time
        self._waiting: dict[Consumer, Callable[[], None]] = {}
        self._withdrawn: list[Consumer] = []
        self._bell = _core.Doorbell()
        self._thread: ThreadPoolExecutor | None = None
        self._users = 0
        self._is_turning = False

    def join(self) -> None:
        """There is a consumer that may have to be waited for."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """There is one less; the thread ends with the last."""
        with self._lock:
            self._users -= 1
            self._end_if_unused()

    def wait_for(self, consumer: Consumer, on_done: Callable[[], None]) -> None:
        """Call `on_done` when the consumer has something for `poll`, or is withdrawn; no thread polls it until then."""
        with self._lock:
            self._waiting[consumer] = on_done
            if self._is_turning:
                self._bell.ring()
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "tensorpool-aio")
            self._thread.submit(self._turn)
            self._is_turning = True

    def withdraw(self, consumer: Consumer) -> None:
        """Wait for it no longer; its `on_done` is called all the same, once that is so."""
        with self._lock:
            self._withdrawn.append(consumer)
            self._bell.ring()

    def _turn(self) -> None:
        with self._lock:
            rings, done = self._bell.rings, self._withdrawn
            self._withdrawn = []
            waited = [consumer for consumer in self._waiting if consumer not in done]
        if waited:
            try:
                done += _core.wait_any(waited, 0 if done else SLICE_NS, self._bell, rings)
            except Exception:  # such as a thread that polls one of them: its own poll raises it
                done += waited
        with self._lock:
            calls = [self._waiting.pop(consumer) for consumer in dict.fromkeys(done) if consumer in self._waiting]
            try:
                self._is_turning = bool(self._waiting)
                if self._is_turning and self._thread is not None:
                    self._thread.submit(self._turn)
            except RuntimeError:  # the process ends
                self._is_turning = False
            self._end_if_unused()
        for call in calls:
            call()

    def _end_if_unused(self) -> None:
        if self._users == 0 and not self._is_turning and self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _start_thread[T](function: Callable[[], T]) -> Future[T]:
    """Run a call that blocks on a thread of its own, which ends with it."""
    thread = ThreadPoolExecutor(1, "tensorpool-aio-call")
    result = thread.submit(function)
    thread.shutdown(wait=False)
    return result


async def _on_thread[T](function: Callable[[], T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(_start_thread(function)))


def _close_late(attaching: Future[Consumer]) -> None:
    """The caller was cancelled while the consumer attached: no other code closes it, and the loop may be gone."""
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().close()
