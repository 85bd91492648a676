# SPDX-License-Identifier: Apache-2.0
"""Consumers for asyncio: the loop goes on while they wait, and a cancelled task leaves no thread and no lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import AsyncConsumer, Client, Producer, State
from tensorpool.errors import AttachRefused, Closed, DriverUnreachable, LocalProtocolError
from tensorpool.wire.driver import Role
from tests.client.conftest import leases, new_name
from tests.support.processes import wait_until

FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def producer(shared_client: Client) -> Iterator[Producer]:
    with shared_client.producer(new_name(), create=True) as producer:
        yield producer


@pytest.fixture(autouse=True)
def _nothing_left_behind(client: Client) -> Iterator[None]:
    """Whatever a test did: no thread, no session, no lease."""
    yield
    wait_until(lambda: not aio_threads(), "no thread is left")
    wait_until(lambda: not client._conductor._sessions, "no session is left")


def aio_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tensorpool-aio")]


async def until(condition: Callable[[], object]) -> None:
    """The loop's own way of waiting for a condition."""
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.002)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_frames_are_awaited(client: Client, producer: Producer) -> None:
    """In order; a loop that is left by `break` gives the lease back."""

    async def main() -> list[int]:
        seqs: list[int] = []
        async with client.aio.consumer(producer.stream_id) as consumer:
            assert consumer.consumer.is_active
            for number in range(5):
                producer.publish(FRAME + number)
                frame = await consumer.poll(20)
                assert frame is not None
                np.testing.assert_array_equal(frame.copy(), FRAME + number)
                seqs.append(frame.seq)
        return seqs

    assert run(main()) == [0, 1, 2, 3, 4]


def test_frames_are_iterated(client: Client, producer: Producer) -> None:
    """It attaches by itself, and closes itself at the end of the loop."""

    async def main() -> None:
        consumer = client.aio.consumer(producer.stream_id)
        seqs: list[int] = []
        feeding = asyncio.create_task(feed(producer))
        async for frame in consumer:
            seqs.append(frame.seq)
            if len(seqs) == 5:
                await consumer.close()
        assert len(seqs) == 5
        assert seqs == sorted(seqs)
        feeding.cancel()

    run(main())


async def feed(producer: Producer) -> None:
    while True:
        producer.publish(FRAME)
        await asyncio.sleep(0.001)


def test_the_loop_goes_on_while_a_consumer_waits(client: Client, producer: Producer) -> None:
    """Other tasks have their turns, and publish what it waits for."""

    async def main() -> None:
        async with client.aio.consumer(producer.stream_id) as consumer:
            turns = 0
            waiting = asyncio.create_task(consumer.poll(None))
            for _ in range(100):
                await asyncio.sleep(0)
                turns += not waiting.done()
            assert turns == 100
            producer.publish(FRAME)
            frame = await waiting
            assert frame is not None

    run(main())


def test_waiting_has_an_end(client: Client, producer: Producer) -> None:
    """Without a frame there is None; without time there is no wait."""

    async def main() -> None:
        async with client.aio.consumer(producer.stream_id) as consumer:
            assert await consumer.poll() is None
            assert await consumer.poll(0.01) is None
            assert await consumer.latest() is None
            producer.publish(FRAME)
            producer.publish(FRAME + 1)
            frame = await consumer.latest()
            assert frame is not None
            assert frame.seq == 1

    run(main())


def test_a_poll_that_is_cancelled_may_be_followed_by_another(client: Client, producer: Producer) -> None:
    """asyncio.wait_for in a loop: nothing is lost and nothing refused."""

    async def main() -> None:
        async with client.aio.consumer(producer.stream_id) as consumer:
            for number in range(5):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(consumer.poll(None), 0.001)
                if number % 2:
                    assert await consumer.latest() is not None
                producer.publish(FRAME)
                frame = await consumer.poll(20)
                assert frame is not None
                assert frame.seq == number
            assert len(aio_threads()) == 1
            assert consumer.consumer.stats.received == 5

    run(main())


def test_a_cancelled_loop_leaves_no_lease(client: Client, producer: Producer, pool: tp.Local) -> None:
    """Nor does its task hang."""

    async def main() -> None:
        consumer = client.aio.consumer(producer.stream_id)

        async def consume() -> None:
            async for _ in consumer:
                pass

        task = asyncio.create_task(consume())
        await until(lambda: consumer._waiting is not None)
        assert leases(pool, producer.stream_id, Role.CONSUMER) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: leases(pool, producer.stream_id, Role.CONSUMER) == 0)

    run(main())


@pytest.mark.parametrize("ends", ["later", "at once"])
def test_who_is_cancelled_while_attaching_leaves_no_lease(
    client: Client, producer: Producer, pool: tp.Local, ends: str
) -> None:
    """Also when the event loop itself ends with the cancellation."""

    async def main() -> None:
        task = asyncio.create_task(client.aio.consumer(producer.stream_id).poll(None))
        await asyncio.sleep(0)  # it has begun to attach
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if ends == "later":
            await until(lambda: not aio_threads())

    run(main())
    wait_until(lambda: not aio_threads(), "the thread has ended")
    wait_until(lambda: leases(pool, producer.stream_id, Role.CONSUMER) == 0, "no lease is left")
    wait_until(lambda: not client._conductor._sessions, "no session is left")


def test_two_who_await_it_first_attach_once(client: Client, producer: Producer, pool: tp.Local) -> None:
    """One lease for both; when one of them is cancelled meanwhile, none is left behind."""

    async def main() -> None:
        consumer = client.aio.consumer(producer.stream_id)
        await asyncio.gather(consumer.latest(), consumer.latest(), consumer.poll())
        assert leases(pool, producer.stream_id, Role.CONSUMER) == 1
        await consumer.close()
        other = client.aio.consumer(producer.stream_id)
        first, second = asyncio.create_task(other.latest()), asyncio.create_task(other.latest())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        await other.close()

    run(main())
    wait_until(lambda: leases(pool, producer.stream_id, Role.CONSUMER) == 0, "no lease is left")


def test_a_refusal_is_the_awaiters(client: Client) -> None:
    """By whichever way it attaches; and options are checked as ever."""

    async def main() -> None:
        with pytest.raises((AttachRefused, DriverUnreachable)):
            async with client.aio.consumer(20_996, timeout=0.1):
                pass
        with pytest.raises((AttachRefused, DriverUnreachable)):
            async for _ in client.aio.consumer(20_996, timeout=0.1):
                pass
        consumer = client.aio.consumer(20_996, timeout=0.1)
        with pytest.raises((AttachRefused, DriverUnreachable)):
            await consumer.poll()
        await consumer.close()
        with pytest.raises(LocalProtocolError):
            await client.aio.consumer(20_996, mode="fast").poll()

    run(main())


def test_before_it_is_attached_there_is_no_consumer(client: Client, producer: Producer) -> None:
    """And after it was closed nothing is awaited."""

    async def main() -> None:
        consumer = client.aio.consumer(producer.stream_id)
        with pytest.raises(Closed, match="not attached"):
            _ = consumer.consumer
        assert await consumer.poll() is None
        assert consumer.consumer.stream_id == producer.stream_id
        await consumer.close()
        await consumer.close()
        assert consumer.consumer.state is State.CLOSED
        with pytest.raises(Closed):
            await consumer.poll()
        with pytest.raises(Closed):
            await consumer.latest()
        assert [frame async for frame in consumer] == []

    run(main())


def test_a_consumer_that_never_attached_closes_too(client: Client) -> None:
    """There is nothing to give back."""

    async def main() -> None:
        consumer = client.aio.consumer(20_995)
        await consumer.close()
        with pytest.raises(Closed):
            await consumer.poll()

    run(main())


def test_closing_ends_a_poll_that_waits(client: Client, producer: Producer) -> None:
    """With None, in whichever task it is."""

    async def main() -> None:
        consumer = client.aio.consumer(producer.stream_id)
        await consumer.poll()
        waiting = asyncio.create_task(consumer.poll(None))
        await asyncio.sleep(0.01)
        await consumer.close()
        async with asyncio.timeout(90):
            assert await waiting is None

    run(main())


def test_a_closed_client_ends_its_loops(pool: tp.Local, producer: Producer) -> None:
    """As if the stream had ended."""

    async def main() -> None:
        with pool.connect() as own:
            consumer = own.aio.consumer(producer.stream_id)
            await consumer.poll()
            waiting = asyncio.create_task(anext(aiter(consumer), None))
            await asyncio.sleep(0.01)
            await asyncio.to_thread(own.close)
            async with asyncio.timeout(90):
                assert await waiting is None

    run(main())


def test_several_consumers_share_a_loop(client: Client, producer: Producer) -> None:
    """One thread waits for all of them, and each gets every frame."""

    async def consume(consumer: AsyncConsumer, count: int) -> list[int]:
        async with consumer:
            seqs: list[int] = []
            ready.append(consumer)
            while len(seqs) < count:
                frame = await consumer.poll(20)
                assert frame is not None
                seqs.append(frame.seq)
            return seqs

    ready: list[AsyncConsumer] = []

    async def main() -> None:
        tasks = [asyncio.create_task(consume(client.aio.consumer(producer.stream_id), 5)) for _ in range(3)]
        await until(lambda: producer.consumers == 3 and len(ready) == 3)
        await until(lambda: len(aio_threads()) == 1)
        for _ in range(5):
            producer.publish(FRAME)
        assert await asyncio.gather(*tasks) == [[0, 1, 2, 3, 4]] * 3

    run(main())
