# SPDX-License-Identifier: Apache-2.0
"""A process with an open producer and consumer forks: whatever the child does, its parent does not notice."""

from __future__ import annotations

from tests.support.processes import run_script

_SCRIPT = """
import asyncio, os, sys, warnings
import numpy as np
import tensorpool as tp
from tensorpool.errors import Closed, TensorPoolError

warnings.simplefilter("ignore", DeprecationWarning)  # that a thread is running is the point

async def use_async(reader):
    for act in (reader.poll(None), reader.latest(), anext(aiter(reader))):
        try:
            assert await act is None, act
            raise AssertionError("an event loop's consumer works in a forked child")
        except Closed as error:
            assert "fork" in str(error), error
    await reader.close()

def misuse(client, producer, consumer, reader, slot, frames, views):
    def publish_after_the_lease():
        producer._session.writer.until_ns = 0
        return producer.publish(np.zeros(10, np.uint8))
    for act in (
        lambda: producer.publish(np.zeros(10, np.uint8)),
        publish_after_the_lease,
        lambda: producer.claim((10,), np.uint8).commit(),
        lambda: producer.set_metadata({"of": "the child"}),
        lambda: producer.publish_blob(b"", blob_type=1),
        producer.drain,
        producer.wait_for_consumers,
        lambda: client.producer(20001, create=True, timeout=1),
        lambda: client.consumer(20000, timeout=1),
        client.discover,
        consumer.poll,
        consumer.latest,
        consumer.wait,
        lambda: next(consumer),
        lambda: list(consumer),
    ):
        try:
            act()
            raise AssertionError(f"{act} works in a forked child")
        except Closed as error:
            assert "fork" in str(error) and ("again" in str(error) or "anew" in str(error)), error
    for act in (slot.commit, slot.abandon):
        try:
            assert act() is None, act
        except Closed:
            pass
    asyncio.run(use_async(reader))
    assert consumer.stats.received == producer.stats.published == 5
    assert [int(view[0]) for view in views] == list(range(5))
    assert all(frame.is_intact() for frame in frames)
    assert frames[4].copy()[0] == 4
    consumer.close(), producer.close(), client.close()

def leave(leaving, pool):
    if leaving == "close":
        pool.close()
    elif leaving == "collect":
        import gc
        for name in ("client", "producer", "consumer", "slot", "frames", "views"):
            del globals()[name]
        gc.collect()
    elif leaving == "at once":
        os._exit(0)
    sys.exit(0)  # which leaves the with blocks as well

with tp.local() as pool, pool.connect() as client:
    with client.producer(20000, create=True) as producer, client.consumer(20000) as consumer:
        assert producer.wait_for_consumers(1, 10)
        for number in range(5):
            producer.publish(np.full(1000, number, np.uint8))
        frames = [consumer.poll(10) for _ in range(5)]
        views = [frame.array for frame in frames]
        reader = client.aio.consumer(20000)
        asyncio.run(reader.poll())
        slot = producer.claim((1000,), np.uint8)
        leases = producer.lease_id, consumer.lease_id, producer.epoch, consumer.epoch
        for leaving in ("close", "exit", "collect", "at once"):
            child = os.fork()
            if child == 0:
                try:
                    if leaving != "at once":
                        misuse(client, producer, consumer, reader, slot, frames, views)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                    os._exit(1)
                leave(leaving, pool)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, leaving
        slot.array[:] = 5
        assert slot.commit() == 5
        for seq in range(6, 200):
            assert producer.publish(np.full(1000, seq % 251, np.uint8)) == seq
        held = [consumer.poll(10).seq]
        while held[-1] < 199:
            frame = consumer.poll(10)
            assert frame.array[0] == frame.seq % 251
            held.append(frame.seq)
        assert (producer.lease_id, consumer.lease_id, producer.epoch, consumer.epoch) == leases
        assert consumer.metadata() is None or "of" not in consumer.metadata().attributes
        assert consumer.stats.received + consumer.stats.lost == producer.stats.published == 200
        assert producer.is_active and consumer.is_active
        asyncio.run(reader.close())
print("unharmed")
"""


def test_a_forked_child_cannot_harm_its_parent() -> None:
    """Whatever it calls raises and names the fork; it can read its views; nothing else changes."""
    code, output = run_script(_SCRIPT)
    assert (code, output.splitlines()[-1:]) == (0, ["unharmed"]), output
