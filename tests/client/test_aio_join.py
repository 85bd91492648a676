# SPDX-License-Identifier: Apache-2.0
"""Streams joined inside an event loop: the same tuples and counts as with threads, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorpool.client import AsyncJoin, Client, FrameCopy, Producer, Unjoined
from tensorpool.errors import AttachRefused, Closed, LocalProtocolError, TensorPoolError
from tests.client.conftest import new_name
from tests.client.test_aio import _nothing_left_behind, run, until  # noqa: F401  the fixture is used by all

NSLOTS = 8  # of the small deployment's rings


@pytest.fixture
def producers(shared_client: Client) -> Iterator[list[Producer]]:
    made = [shared_client.producer(new_name(), create=True) for _ in range(2)]
    yield made
    for producer in made:
        producer.close()


def joined(client: Client, producers: list[Producer], **options: Any) -> AsyncJoin:
    return client.aio.join([client.aio.consumer(producer.stream_id) for producer in producers], **options)


def publish(producer: Producer, seq: int) -> None:
    assert producer.publish(np.full(4, seq, np.int64), seq=seq) == seq


async def drained(join: AsyncJoin) -> list[tuple[int, ...]]:
    found = []
    while (one := await join.poll(0.3)) is not None:
        found.append(tuple(frame.seq for frame in one))
    return found


def test_equal_seqs_are_joined_with_the_same_counts(client: Client, producers: list[Producer]) -> None:
    """Every frame is in a tuple, has a reason, or waits."""

    async def main() -> None:
        async with joined(client, producers, by="seq") as join:
            for seq in (0, 1, 3, 4):
                publish(producers[0], seq)
            for seq in (1, 2, 4):
                publish(producers[1], seq)
            assert await drained(join) == [(1, 1), (4, 4)]
            stats = join.stats
            assert stats.unjoined == ({Unjoined.NO_PARTNER: 2}, {Unjoined.NO_PARTNER: 1})
            assert (stats.received, stats.waiting, stats.joined) == ((4, 3), (0, 0), 2)

    run(main())


def test_the_loop_goes_on_while_a_join_waits(client: Client, producers: list[Producer]) -> None:
    """A frame that comes last ends the wait at once, and the iterator gives the leases back."""

    async def main() -> None:
        join = joined(client, producers, by="seq")
        turns = 0

        async def feed() -> None:
            nonlocal turns
            await until(lambda: all(producer.consumers for producer in producers))
            for seq in range(5):
                publish(producers[0], seq)
                await asyncio.sleep(0.01)
                turns += 1
                publish(producers[1], seq)

        feeding = asyncio.create_task(feed())
        seqs = []
        async for left, right in join:
            assert left.seq == right.seq
            seqs.append(left.seq)
            if len(seqs) == 5:
                break
        await feeding
        await join.close()
        assert (seqs, turns) == ([0, 1, 2, 3, 4], 5)
        with pytest.raises(Closed):
            await join.poll()

    run(main())


def test_frames_that_wait_too_long_are_verified_copies_or_time_out(client: Client, producers: list[Producer]) -> None:
    """As with threads: a partner that is late by half a ring costs memory; by more than the timeout, a frame."""

    async def main() -> None:
        async with joined(client, producers, by="seq", timeout=60.0) as join:
            for seq in range(2 * NSLOTS):
                publish(producers[0], seq)
                while join.stats.received[0] < producers[0].next_seq:
                    assert await join.poll(0.05) is None
            publish(producers[1], 3)
            found = await join.poll(20)
            assert found is not None
            assert [type(frame) is FrameCopy for frame in found] == [True, False]
            np.testing.assert_array_equal(found[0].array, np.full(4, 3))
            assert join.stats.copied > 0
        async with joined(client, producers, by="seq", timeout=0.05) as join:
            publish(producers[0], 100)
            begun_s = time.monotonic()
            while join.stats.unjoined[0] != {Unjoined.TIMED_OUT: 1}:
                assert await join.poll(0.5) is None
                assert time.monotonic() - begun_s < 60

    run(main())


def test_a_timeout_and_a_cancelled_poll_lose_nothing(client: Client, producers: list[Producer]) -> None:
    async def main() -> None:
        async with joined(client, producers, by="latest") as join:
            assert await join.poll(0.01) is None
            waiting = asyncio.create_task(join.poll(None))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            publish(producers[1], 0)
            while join.stats.received[1] < 1:
                assert await join.poll(0.05) is None
            publish(producers[0], 0)
            found = await join.poll(20)
            assert found is not None
            assert [frame.seq for frame in found] == [0, 0]

    run(main())


def test_what_is_refused_leaves_no_lease(client: Client, producers: list[Producer]) -> None:
    """Wrong options, and a stream that cannot be attached."""

    async def main() -> None:
        with pytest.raises(Closed, match="not attached"):
            _ = joined(client, producers, by="seq").stats
        with pytest.raises(LocalProtocolError, match="tolerance"):
            await joined(client, producers, by="time").poll()
        with pytest.raises(LocalProtocolError, match=r"consumers of client\.aio"):
            client.aio.join([client.aio.consumer(producers[0].stream_id), 5], by="seq")  # type: ignore[list-item]
        bad = client.aio.consumer(4_000_000, timeout=0.5)
        with pytest.raises((AttachRefused, TensorPoolError)):
            async with client.aio.join([client.aio.consumer(producers[0].stream_id), bad], by="seq"):
                pass

    run(main())
