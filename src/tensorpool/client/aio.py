# SPDX-License-Identifier: Apache-2.0
"""Consumers for asyncio: the event loop never blocks, and a cancelled loop leaves neither a thread nor a lease.

One thread per consumer sleeps in shared memory on the loop's behalf; frames are taken on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tensorpool.client.arguments import seconds
from tensorpool.client.consumer import Consumer
from tensorpool.client.frame import Frame
from tensorpool.client.stream_reader import ConsumerStats
from tensorpool.errors import Closed

if TYPE_CHECKING:
    from tensorpool.client.client import Client

SLICE_S: Final = 0.1


class AsyncClient:
    """The asyncio face of a `Client`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def consumer(self, stream: int | str, **options: Any) -> AsyncConsumer:
        """Like `Client.consumer`; attaches when it is entered or first awaited.

        >>> async for frame in client.aio.consumer("camera/front"):     # doctest: +SKIP
        ...     await show(frame.copy())
        """
        return AsyncConsumer(self._client, stream, options)


class AsyncConsumer:
    """Receives the frames of one stream inside an event loop."""

    def __init__(self, client: Client, stream: int | str, options: dict[str, Any]) -> None:
        self._client = client
        self._stream = stream
        self._options = options
        self._consumer: Consumer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: asyncio.Future[bool] | None = None
        self._is_closed = False
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
            left = SLICE_S if deadline is None else min(deadline - loop.time(), SLICE_S)
            if left <= 0:
                return None
            await self._sleep(consumer, left)
            if consumer.state == "CLOSED":
                return None
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
        """Give the lease back and end the waiting thread. In a forked child there is neither."""
        self._is_closed = True
        consumer, thread = self._consumer, self._thread
        if os.getpid() != self._pid:
            return
        if consumer is not None and thread is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, consumer.close))
        if thread is not None:
            thread.shutdown(wait=False)
        self._thread = None

    async def __aenter__(self) -> Self:
        await self._attached()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        try:
            while not self._is_closed:
                frame = await self.poll(None)
                if frame is None:
                    return
                yield frame
        finally:
            if not self._is_closed:
                await self.close()

    async def _described(self, frame: Frame) -> None:
        """Have the thread wait for metadata that a frame's dtype depends on: `frame.array` must not block the loop."""
        mapped, slot = frame._mapped, frame._slot
        if not mapped.is_described(slot) and self._thread is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, mapped.carried, slot))

    async def _settled(self) -> None:
        """One thread polls a consumer: let a wait that was left behind end first."""
        if self._waiting is not None and not self._waiting.done():
            await asyncio.shield(self._waiting)

    async def _attached(self) -> Consumer:
        async with self._attaching:  # a second caller finds what the first has attached
            if self._is_closed:
                raise Closed("the consumer is closed")
            if self._consumer is None:
                self._consumer = await self._attach_on_thread()
            self._consumer._session.check_process()
            return self._consumer

    async def _attach_on_thread(self) -> Consumer:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tensorpool-aio")
        attaching = self._thread.submit(self._attach)
        try:
            return await asyncio.shield(asyncio.wrap_future(attaching))
        except asyncio.CancelledError:
            attaching.add_done_callback(_close_late)
            self._thread.shutdown(wait=False)
            self._is_closed = True
            raise
        except BaseException:
            self._thread.shutdown(wait=False)
            self._thread = None
            raise

    def _attach(self) -> Consumer:
        return self._client.consumer(self._stream, **self._options)

    async def _sleep(self, consumer: Consumer, timeout: float) -> None:
        """Have the thread wait; one that a cancelled caller left behind is used up first."""
        if self._waiting is None or self._waiting.done():
            assert self._thread is not None
            loop = asyncio.get_running_loop()
            self._waiting = loop.run_in_executor(self._thread, consumer.wait, timeout)
        await asyncio.shield(self._waiting)


def _close_late(attaching: Future[Consumer]) -> None:
    """The caller was cancelled while the consumer attached: no other code closes it, and the loop may be gone."""
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().close()
