# SPDX-License-Identifier: Apache-2.0
"""The producer behind a sink: rows checked one by one, attempts that go on, a lease that stays and goes; no Spark."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.errors import TensorPoolError
from tensorpool.lake.live_options import sink_options
from tensorpool.spark.sink import order_of
from tensorpool.spark.sink_process import Order, RowRefused, SinkConnection, end, frame_of
from tensorpool.wire.control import Dtype
from tensorpool.wire.driver import Role
from tests.support.deployment import options_of, pattern
from tests.support.processes import Process, wait_until

GOOD: dict[str, Any] = {"payload": b"\1\2\3\4\5\6", "dtype": "UINT8", "shape": [2, 3]}


# --- rows


def test_a_row_is_an_array() -> None:
    dtype, shape, order, data = frame_of({**GOOD, "order": "F"}, "row 0")
    assert (dtype, shape, order) == (Dtype.UINT8, (2, 3), "F")
    assert data.tolist() == [[1, 3, 5], [2, 4, 6]]
    assert frame_of({"payload": b"\7", "dtype": "BIT", "shape": [3]}, "row 0")[3].tolist() == [7]
    assert frame_of({"payload": b"", "dtype": "FLOAT64", "shape": [0, 4]}, "row 0")[3].shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload": None}, "row 7: payload is null"),
        ({"dtype": None}, "row 7: dtype is null"),
        ({"shape": None}, "row 7: shape is null"),
        ({"dtype": "COMPLEX64"}, "row 7: dtype 'COMPLEX64'; expected one of UINT8, INT8"),
        ({"dtype": "UNKNOWN"}, "row 7: dtype 'UNKNOWN'; expected one of"),
        ({"order": "K"}, "row 7: order 'K'; expected C or F"),
        ({"shape": []}, "row 7: shape"),
        ({"shape": [-2, 3]}, "row 7: shape"),
        ({"shape": [None, 3]}, "row 7: shape"),
        ({"shape": [2, 2]}, r"row 7: payload of 6 bytes; UINT8 \[2, 2\] has 4"),
        ({"dtype": "INT16"}, r"row 7: payload of 6 bytes; INT16 \[2, 3\] has 12"),
    ],
)
def test_a_row_that_is_no_frame_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RowRefused, match=words):
        frame_of(GOOD | change, "row 7")


# --- the process


@pytest.fixture
def order(pool: tp.Local, stream: Callable[..., int]) -> Iterator[Order]:
    stream_id = stream("tiny")
    options = sink_options({"streams": str(stream_id), **options_of(pool)})
    order = order_of(options, uuid.uuid4().hex, stream_id, os.getpid())
    yield order
    end(order.key)


def rows(*numbers: int, nbytes: int = 64) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"payload": pattern(number, nbytes).tobytes(), "dtype": "UINT8", "shape": [nbytes]} for number in numbers]
    )


def producers(pool: tp.Local, stream_id: int | str) -> int:
    held = list(pool.conductor.lifecycle.leases)
    return sum((lease.stream_id, lease.role) == (stream_id, Role.PRODUCER) for lease in held)


def numbers_in(client: Client, stream_id: int | str) -> list[int]:
    """What the ring of a stream holds."""
    with client.watch(stream_id) as watch:
        epoch = watch.epochs[-1]
        slots = [epoch.mapped.reader.read(seq) for seq in range(epoch.first, epoch.end)]
        return [int(np.frombuffer(epoch.mapped.view(slot)[:8].tobytes(), "<u8")[0]) for slot in slots]  # type: ignore[arg-type]


def test_batches_share_one_lease_and_an_attempt_goes_on_where_the_last_one_ended(
    pool: tp.Local, client: Client, order: Order
) -> None:
    with SinkConnection(order, batch=0, partition=3) as publisher:
        publisher.publish(rows(0, 1))
    with SinkConnection(order, batch=0, partition=3) as again:
        again.publish(rows(0, 1, 2))
        again.publish(rows(3))
        assert again.rows == 4
    with pytest.raises(TensorPoolError, match=r"partitions 3 and 4; one task writes a stream.*coalesce\(1\)"):
        SinkConnection(order, batch=0, partition=4)
    with SinkConnection(order, batch=1, partition=0) as later:
        later.publish(rows(4))
    assert numbers_in(client, order.stream) == [0, 1, 2, 3, 4]
    assert producers(pool, order.stream) == 1
    end(order.key)
    assert producers(pool, order.stream) == 0


def test_a_bad_row_is_named_and_the_good_ones_before_it_are_out(client: Client, order: Order) -> None:
    bad = pa.RecordBatch.from_pylist([*rows(0, 1).to_pylist(), {**GOOD, "shape": [7]}])
    with SinkConnection(order, batch=0, partition=0) as publisher:
        words = rf"row 2 \(stream {order.stream}, partition 0\): payload of 6 bytes; UINT8 \[7\] has 7"
        with pytest.raises(RowRefused, match=words):
            publisher.publish(bad)
        with pytest.raises(RowRefused, match=r"8192 bytes fits no pool of stream .*: the largest holds 4096"):
            publisher.publish(rows(0, 1, 2, nbytes=8192))
    assert numbers_in(client, order.stream) == [0, 1]


def test_what_keeps_a_publisher_from_its_stream_reaches_the_task(order: Order, shm_dir: Path) -> None:
    nowhere = msgspec.structs.replace(order, key=uuid.uuid4().hex, aeron_dir=str(shm_dir / "nothing"))
    with pytest.raises(TensorPoolError, match="nothing"):
        SinkConnection(nowhere, batch=0, partition=0)
    end(nowhere.key)


def test_a_publisher_goes_with_its_spark(pool: tp.Local, order: Order) -> None:
    with Process("-c", "input()") as parent:
        child = msgspec.structs.replace(order, parent=parent.pid)
        with SinkConnection(child, batch=0, partition=0) as publisher:
            publisher.publish(rows(0))
        assert producers(pool, order.stream) == 1
    wait_until(lambda: producers(pool, order.stream) == 0, "the lease is given back")
