# SPDX-License-Identifier: Apache-2.0
"""float16, bfloat16 and complex frames: carried as dtypes that the wire has, and shown as what was published."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.client.metadata import to_message
from tensorpool.errors import LocalProtocolError
from tensorpool.shm import carried_dtypes
from tensorpool.wire.control import Dtype
from tests.client.conftest import SMALL, Pair, new_name
from tests.support.processes import wait_until

WAVES = (np.arange(12) * (1 - 2j)).reshape(3, 4)
CARRIED = {
    "float16": (np.linspace(-2, 2, 12).astype(np.float16).reshape(3, 4), Dtype.UINT16),
    "bfloat16": (np.linspace(-2, 2, 12).astype(ml_dtypes.bfloat16).reshape(3, 4), Dtype.UINT16),
    "complex64": (WAVES.astype(np.complex64), Dtype.FLOAT32),
    "complex128": (WAVES, Dtype.FLOAT64),
}


def check(frame: tp.Frame, array: np.ndarray[Any, Any]) -> None:
    assert (frame.dtype, frame.shape) == (array.dtype, array.shape)
    assert (frame.array.dtype, frame.array.shape, frame.array.flags.owndata) == (array.dtype, array.shape, False)
    np.testing.assert_array_equal(frame.array, array)
    np.testing.assert_array_equal(frame.copy(), array)


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("how", ["publish", "strided", "fortran", "keep_strides", "claim"])
def test_an_array_arrives_in_the_dtype_that_was_published(pair: Pair, name: str, how: str) -> None:
    """Without a copy, again and again, and under metadata that say so beside the user's own."""
    array, wire = CARRIED[name]
    pair.producer.set_metadata({"lens": "wide"}, tags=["lab"])
    for _ in range(12):  # more than the ring has slots
        match how:
            case "claim":
                with pair.producer.claim(array.shape, array.dtype) as slot:
                    slot.array[...] = array
                frame = pair.consumer.poll(20)
                assert frame is not None
            case "keep_strides":
                frame = pair.publish(np.repeat(array, 2, axis=1)[:, ::2], keep_strides=True)
            case "strided":
                frame = pair.publish(np.repeat(array, 2, axis=1)[:, ::2])
            case "fortran":
                frame = pair.publish(np.asfortranarray(array))
            case _:
                frame = pair.publish(array)
        check(frame, array)
        assert (frame.wire_dtype, frame.numpy_dtype, frame.meta_version) == (wire, name, 2)
    found = pair.consumer.metadata(2)
    assert found is not None
    assert (found.attributes, found.tags) == ({"lens": "wide", "numpy_dtype": name}, ("lab",))


def test_a_stream_may_change_between_a_dtype_and_what_carries_it(pair: Pair) -> None:
    """Each frame is shown as it was published; the metadata change where they have to, and only there."""
    half, short, byte = np.arange(8, dtype=np.float16), np.arange(8, dtype=np.uint16), np.arange(8, dtype=np.uint8)
    versions = []
    for array in (short, short, half, half, short, short, half, byte, half, short):
        frame = pair.publish(array)
        check(frame, array)
        versions.append(frame.meta_version)
    assert versions == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]
    pair.publish(half)
    with pair.producer.claim((8,), np.uint16) as slot:
        slot.array[:] = short
    claimed = pair.consumer.poll(20)
    assert claimed is not None
    check(claimed, short)
    pair.producer.set_metadata({"lens": "wide"})
    check(pair.publish(half), half)
    check(pair.publish(np.ones((3, 2), np.float32)), np.ones((3, 2), np.float32))
    for array in (short, half, half) * 12:  # each slot gets both, more than once
        check(pair.publish(array), array)


def test_a_frame_waits_for_the_metadata_that_its_dtype_depends_on(pair: Pair) -> None:
    """Its array is not handed out before they are there, and then it is right."""
    bits = np.arange(8, dtype=np.float16).view(np.uint16)
    frame = pair.publish(bits, meta_version=7)
    shown: list[np.ndarray[Any, Any]] = []
    reader = threading.Thread(target=lambda: shown.append(frame.array))
    reader.start()
    wait_until(lambda: pair.consumer._session.conductor._waiters > 0, "the reader waits")
    assert shown == []
    said = to_message(1, 7, {"numpy_dtype": "float16"}, (), 5)
    pair.producer.repeat_metadata(said)
    reader.join(60)
    assert [array.dtype for array in shown] == [np.float16]
    check(pair.publish(bits.view(np.float16)), bits.view(np.float16))


def test_metadata_that_do_not_come_are_waited_for_once_and_warned_about() -> None:
    """For three announce periods; then the array is what the wire says. Other dtypes never wait."""
    quick = {"policies.announce_period_ms": 100}
    with tp.local(overrides=SMALL | quick) as pool, pool.connect() as client:
        producer = client.producer("undescribed", create=True)
        pair = Pair(producer, client.consumer("undescribed"))
        assert producer.wait_for_consumers(1, 60)
        assert pair.publish(np.arange(4, dtype=np.uint8), meta_version=7).array.dtype == np.uint8
        assert pair.publish(np.ones((2, 3)), meta_version=7).array.dtype == np.float64
        frame = pair.publish(np.arange(4, dtype=np.uint16), meta_version=7)
        with pytest.warns(RuntimeWarning, match="metadata version 7 did not come"):
            assert frame.array.dtype == np.uint16
        assert pair.publish(np.arange(4, dtype=np.uint16), meta_version=7).array.dtype == np.uint16


@pytest.mark.parametrize("conductor", ["thread", "invoked"])
def test_a_consumer_that_comes_later_and_an_invoked_one_restore_too(
    pool: tp.Local, client: Client, conductor: Any
) -> None:
    """The producer says again what frames mean; a client without a thread turns its conductor while it waits."""
    array = np.arange(8, dtype=np.float16)
    with client.producer(new_name(), create=True) as producer:
        producer.publish(array)
        with (
            tp.connect(pool.aeron_dir, config=pool.config, conductor=conductor) as other,
            other.consumer(producer.stream_id) as consumer,
        ):
            wait_until(consumer.latest, "a frame is there")
            frame = consumer.latest()
            assert frame is not None
            check(frame, array)


def test_an_event_loop_does_not_wait_for_metadata(pair: Pair, shared_client: Client) -> None:
    """The thread of the asynchronous consumer does."""
    array = np.arange(8, dtype=np.float16)

    async def receive() -> None:
        async with shared_client.aio.consumer(pair.producer.stream_id) as consumer:
            while pair.producer.consumers < 2:
                await asyncio.sleep(0.01)
            pair.producer.publish(array)
            frame = await consumer.poll(60)
            assert frame is not None
            assert frame._mapped.is_described(frame._slot)
            check(frame, array)

    asyncio.run(receive())


def test_bfloat16_shows_as_uint16_without_ml_dtypes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what it is."""
    monkeypatch.setattr(carried_dtypes, "_bfloat16", lambda: np.dtype(np.uint16))
    array, _ = CARRIED["bfloat16"]
    frame = pair.publish(array)
    assert (frame.dtype, frame.numpy_dtype) == (np.uint16, "bfloat16")
    np.testing.assert_array_equal(frame.array, array.view(np.uint16))


def test_what_cannot_be_carried_is_refused_where_the_caller_stands(pair: Pair) -> None:
    """An attribute that is the producer's, a version that says something else, columns of complex numbers."""
    with pytest.raises(LocalProtocolError, match="'numpy_dtype' is what the producer fills"):
        pair.producer.set_metadata({"numpy_dtype": "float16"})
    with pytest.raises(LocalProtocolError, match="frames of float16 choose their own"):
        pair.producer.publish(np.zeros(4, np.float16), meta_version=1)
    with pytest.raises(LocalProtocolError, match="complex64 is sent in C order"):
        pair.producer.claim((2, 2), np.complex64, order="F")
    with pytest.raises(LocalProtocolError, match="use astype"):
        pair.producer.publish(np.zeros(4, np.float16), dtype=np.uint16)
    assert pair.producer.stats.published == 0
