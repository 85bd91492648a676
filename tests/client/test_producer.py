# SPDX-License-Identifier: Apache-2.0
"""Producers: frames and slots, what they mean, and who has read them, as their users see it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.channel import Endpoint
from tensorpool.client import Client, DropReason
from tensorpool.client.known_consumers import PrivateStream
from tensorpool.errors import (
    Closed,
    FrameTooLarge,
    LocalProtocolError,
)
from tensorpool.wire.control import (
    Attribute,
    DataSourceAnnounce,
    DataSourceMeta,
    MetaBlobComplete,
)
from tensorpool.wire.trace import TraceLinkSet
from tests.client.conftest import FRAME, MS, Outsider, Pair, hello, new_name, paired
from tests.support.messages import consumer_qos
from tests.support.processes import wait_until

# --- frames


def test_every_frame_arrives_with_what_was_given(pair: Pair) -> None:
    """In order, one object each."""
    for number in range(20):
        before = time.monotonic_ns()
        frame = pair.publish(FRAME + number, trace_id=number)
        np.testing.assert_array_equal(frame.array, FRAME + number)
        assert frame.seq == number
        assert frame.trace_id == number
        assert frame.timestamp_ns is not None
        assert before <= frame.timestamp_ns <= time.monotonic_ns()
        assert frame.publish_timestamp_ns is None
        assert (frame.stream_id, frame.epoch) == (pair.producer.stream_id, pair.producer.epoch)
    stats = pair.consumer.stats
    assert (stats.received, stats.lost, stats.last_seq_seen, stats.epochs) == (20, 0, 19, 1)
    assert pair.producer.stats.published == 20
    assert pair.producer.stats.bytes == 20 * 24


def test_a_capture_time_of_the_users_own_and_the_time_of_publishing(shared_client: Client) -> None:
    """Each where it belongs."""
    with shared_client.producer(new_name(), create=True, with_publish_time=True) as producer:
        consumer = shared_client.consumer(producer.stream_id)
        producer.wait_for_consumers(1, 20)
        before = time.monotonic_ns()
        frame = Pair(producer, consumer).publish(timestamp_ns=5)
        assert frame.timestamp_ns == 5
        assert frame.publish_timestamp_ns is not None
        assert before <= frame.publish_timestamp_ns <= time.monotonic_ns()
        consumer.close()


@pytest.mark.parametrize(
    "bad",
    [
        np.array(["2020"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.array([object()]),
        np.zeros(2, ">f2"),
        np.zeros(2, np.longdouble),
        np.zeros((1,) * 8, np.complex64),
        np.complex64(3),
        np.zeros(2, "S3"),
        np.zeros(2, ">i4"),
        np.zeros(2, [("a", "i4")]),
        np.float64(3),
        "text",
        np.zeros((1,) * 9),
    ],
    ids=lambda bad: str(getattr(bad, "dtype", type(bad))),
)
def test_what_no_frame_can_carry_is_refused_and_nothing_published(pair: Pair, bad: Any) -> None:
    """By the same error the first time and after frames that were fine."""
    for _ in range(2):
        with pytest.raises(LocalProtocolError):
            pair.producer.publish(bad)
        pair.publish()
    assert (pair.producer.stats.published, pair.producer.stats.dropped) == (2, {})


@pytest.mark.parametrize(
    "array",
    [
        [[1, 2], [3, 4]],
        range(5),
        np.ma.masked_array([1.5, 2.5], [False, True]),
        np.zeros((4, 6))[::2, ::3],
        np.arange(24).reshape(2, 3, 4).T,
        np.arange(10)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.empty((3, 0)),
        np.zeros((5, 1, 2), order="F"),
        memoryview(b"bytes"),
    ],
    ids=lambda array: type(array).__name__,
)
def test_everything_that_numpy_can_see_is_published(pair: Pair, array: Any) -> None:
    """Lists, views, strides of any kind."""
    frame = pair.publish(array)
    expected = np.asarray(array)
    assert frame.shape == expected.shape
    assert frame.dtype == expected.dtype
    np.testing.assert_array_equal(frame.copy(), expected)


@pytest.mark.spec("WIRE-9-04", "WIRE-9-05")
@pytest.mark.parametrize("how", ["publish", "strided", "claim", "check_fits"])
def test_a_frame_that_fits_no_pool_raises_and_is_counted(pair: Pair, how: str) -> None:
    """With both sizes and the stream; no seq is used up, and the next frame that fits goes out."""
    array = np.zeros((65_537, 2), np.uint8)[:, 0]
    calls: dict[str, Callable[[], object]] = {
        "publish": lambda: pair.producer.publish(np.ascontiguousarray(array)),
        "strided": lambda: pair.producer.publish(array),
        "claim": lambda: pair.producer.claim(array.shape),
        "check_fits": lambda: pair.producer.check_fits(array.nbytes),
    }
    with pytest.raises(FrameTooLarge, match=r"65537 bytes.*largest holds 65536.*stride_bytes") as caught:
        calls[how]()
    assert (caught.value.nbytes, caught.value.max_frame_bytes) == (65_537, 65_536)
    assert str(pair.producer.stream_id) in caught.value.stream
    assert pair.producer.stats.dropped == {DropReason.NO_POOL: 1}
    assert pair.publish().seq == 0


def test_parents_need_a_trace_and_nothing_is_published_without(pair: Pair, outsider: Outsider) -> None:
    """An error of the caller's has no effect but the error."""
    for array in (FRAME, np.zeros((4, 4))[::2]):
        with pytest.raises(LocalProtocolError, match="trace_id"):
            pair.producer.publish(array, trace_id=0, parents=[1])
    assert pair.producer.stats.published == 0
    assert pair.publish().seq == 0


@pytest.mark.parametrize("parents", [[-1], [2**64], ["x"], range(30_000)], ids=["-1", "2^64", "text", "too many"])
def test_parents_that_cannot_be_encoded_are_refused_and_other_producers_go_on(
    client: Client, outsider: Outsider, parents: Any
) -> None:
    """By the call that gave them; metadata goes on, and the leases of this client stay."""
    pair = paired(client)
    leases = pair.producer.lease_id, pair.consumer.lease_id
    with pytest.raises((LocalProtocolError, TypeError, ValueError, OverflowError)):
        pair.producer.publish(FRAME, trace_id=1, parents=parents)
    pair.producer.set_metadata({"after": 1})
    wait_until(lambda: pair.consumer.metadata() is not None, "metadata goes on")
    assert (pair.producer.lease_id, pair.consumer.lease_id) == leases


@pytest.mark.spec("WIRE-10.2.1-13")
@pytest.mark.parametrize("array", [FRAME, np.zeros((4, 4))[::2]], ids=["contiguous", "strided"])
def test_a_trace_is_linked_to_its_parents(pair: Pair, outsider: Outsider, array: np.ndarray[Any, Any]) -> None:
    """N to 1, on the metadata stream, with the frame that it leads to."""
    frame = pair.publish(array, trace_id=9, parents=(number for number in (3, 5)))
    link = outsider.wait_for(TraceLinkSet, lambda it: it.stream_id == pair.producer.stream_id)
    assert (link.trace_id, link.epoch, link.seq) == (9, frame.epoch, frame.seq)
    assert [parent.trace_id for parent in link.parents] == [3, 5]


# --- slots


def test_a_slot_is_filled_in_place(pair: Pair) -> None:
    """Published when the block is left, and no message about it is sent before."""
    with pair.producer.claim((2, 3), np.float32, "F", meta_version=4, trace_id=8, timestamp_ns=6) as slot:
        assert slot.seq == 0
        assert slot.array.flags.f_contiguous
        assert slot.array.flags.writeable
        slot.array[:] = FRAME
        assert pair.consumer.poll() is None
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert (frame.order, frame.meta_version, frame.trace_id, frame.timestamp_ns) == ("F", 4, 8, 6)
    np.testing.assert_array_equal(frame.array, FRAME)
    assert pair.producer.stats.bytes == 24


def test_an_exception_gives_the_slot_up(pair: Pair) -> None:
    """No consumer sees the frame, its seq is used again, and the error is the user's."""
    with pytest.raises(KeyError), pair.producer.claim((3,)) as slot:
        raise KeyError
    assert slot.seq is None
    assert pair.publish().seq == 0
    stats = pair.producer.stats
    assert (stats.published, stats.dropped) == (1, {})


def test_a_slot_is_committed_once(pair: Pair) -> None:
    """By hand or by the block; after that it is over."""
    slot = pair.producer.claim((3,))
    assert slot.commit() == 0
    with pytest.raises(LocalProtocolError, match="already"):
        slot.commit()
    with pytest.raises(LocalProtocolError, match="committed"):
        slot.progress(rows=1)
    slot.abandon()  # nothing
    with pair.producer.claim((3,)) as slot:
        slot.commit()
    with pair.producer.claim((3,)) as slot:
        slot.abandon()
    assert pair.producer.stats.published == 2


def test_one_slot_at_a_time(pair: Pair) -> None:
    """The second claim is refused, and so is a frame beside it; the first stays good."""
    with pair.producer.claim((3,)) as slot:
        with pytest.raises(LocalProtocolError, match="claimed"):
            pair.producer.claim((3,))
        with pytest.raises(LocalProtocolError, match="claimed"):
            pair.producer.publish(FRAME)
        slot.array[:] = 5
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert list(frame.array) == [5, 5, 5]
    assert pair.publish().seq == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ((), np.uint8),
        ((1,) * 9, np.uint8),
        ((-1,), np.uint8),
        ((), np.complex64),
        ((3,), np.longdouble),
        ((2**31,), np.uint8),
    ],
    ids=str,
)
def test_a_slot_that_no_frame_can_fill_is_refused(pair: Pair, arguments: Any) -> None:
    """Before anything is claimed."""
    with pytest.raises(LocalProtocolError):
        pair.producer.claim(*arguments)
    assert pair.publish().seq == 0


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 4), "diagonals"), ((4,), "columns")], ids=["no such axis", "no columns"]
)
def test_progress_along_what_the_frame_does_not_have_is_refused(pair: Pair, shape: tuple[int, ...], axis: Any) -> None:
    """By name."""
    with pytest.raises(LocalProtocolError, match="progress"):
        pair.producer.claim(shape, progress=axis)
    assert pair.publish().seq == 0


@pytest.mark.parametrize("wrong", [{}, {"rows": 1, "bytes_filled": 1}, {"columns": 1}, {"rows": 5}, {"rows": -1}])
def test_progress_that_makes_no_sense_is_refused(pair: Pair, wrong: dict[str, int]) -> None:
    """And the frame goes on."""
    with pair.producer.claim((4, 16), progress="rows") as slot:
        with pytest.raises(LocalProtocolError):
            slot.progress(**wrong)
        slot.array[:] = 1
    assert pair.consumer.poll(20) is not None
    with pair.producer.claim((4, 16)) as slot, pytest.raises(LocalProtocolError):
        slot.progress(rows=1)


def test_a_slot_that_is_over_cannot_be_written(pair: Pair) -> None:
    """Committed or given up: `array` is read-only from then on."""
    with pair.producer.claim((4,)) as committed:
        committed.array[:] = 7
    given_up = pair.producer.claim((4,))
    given_up.abandon()
    for slot in (committed, given_up):
        with pytest.raises(ValueError, match="read-only"):
            slot.array[0] = 9
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert list(frame.array) == [7, 7, 7, 7]


# --- strides, bits, bytes


def padded_rows() -> np.ndarray[Any, Any]:
    """As a camera delivers them: 30 pixels and 2 of padding."""
    return np.arange(20 * 32, dtype=np.uint16).reshape(20, 32)[:, :30]


@pytest.mark.parametrize("keep", [False, True])
def test_padded_rows_arrive_packed_or_as_they_are(pair: Pair, keep: bool) -> None:
    """The same values either way; with keep_strides one block is copied and the reader sees the padding's distance."""
    image = padded_rows()
    frame = pair.publish(image, keep_strides=keep)
    np.testing.assert_array_equal(frame.array, image)
    assert frame.array.strides == ((64, 2) if keep else (60, 2))
    assert frame.nbytes == (19 * 64 + 60 if keep else 20 * 60)
    copy = frame.copy()
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, image)
    assert pair.producer.stats.bytes == frame.nbytes
    packed = np.zeros(frame.nbytes, np.uint8)
    assert pair.publish(packed).shape == packed.shape, "the next array is taken for what it is"


def test_a_slot_has_the_strides_that_were_asked_for(pair: Pair) -> None:
    """A device writes its padded rows in place, and reports them; the last row may lack its padding."""
    with pair.producer.claim((20, 30), np.uint16, strides=(64, 2), progress="rows") as slot:
        assert slot.array.strides == (64, 2)
        slot.array[:] = padded_rows()
        slot.progress(rows=19)
        slot.progress(rows=20)
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert frame.array.strides == (64, 2)
    np.testing.assert_array_equal(frame.array, padded_rows())


def test_a_strided_frame_that_no_pool_holds_is_too_large(pair: Pair) -> None:
    """By its extent, padding included."""
    wide = np.zeros((65, 2048), np.uint8)[:, :1000]
    with pytest.raises(FrameTooLarge):
        pair.producer.publish(wide, keep_strides=True)
    assert pair.producer.stats.dropped == {DropReason.NO_POOL: 1}
    assert pair.publish(wide[:20]).shape == (20, 1000)


def test_bits_and_bytes_are_published(pair: Pair) -> None:
    """With the dtype that they have on the wire; the next uint8 array is a uint8 array again."""
    bits = np.array([1, 0, 1, 1, 0, 0, 0, 1, 1, 1], bool)
    packed = np.packbits(bits)
    frame = pair.publish(packed, dtype=tp.Dtype.BIT, shape=(2, 5))
    assert (frame.wire_dtype, frame.shape) == (tp.Dtype.BIT, (2, 5))
    np.testing.assert_array_equal(np.unpackbits(frame.array, count=10), bits)
    np.testing.assert_array_equal(frame.copy(), packed)
    plain = pair.publish(packed)
    assert (plain.wire_dtype, plain.shape) == (tp.Dtype.UINT8, (2,))
    for data in (b"some bytes", bytearray(b"some bytes"), memoryview(b"some bytes")):
        frame = pair.publish(data, dtype=tp.Dtype.BYTES)  # type: ignore[arg-type]
        assert (frame.wire_dtype, frame.shape, frame.array.tobytes()) == (tp.Dtype.BYTES, (10,), b"some bytes")
    again = pair.publish(np.frombuffer(b"some bytes", np.uint8))
    assert again.wire_dtype is tp.Dtype.UINT8


# --- metadata


def test_metadata_travels_with_its_version(pair: Pair) -> None:
    """Frames name the version that was set last; consumers know both."""
    assert pair.producer.set_metadata({"serial": "A7", "gain": 2.5}, tags=["raw"], summary="640x480") == 1
    first = pair.publish()
    assert pair.producer.set_metadata({"serial": "A8"}) == 2
    second = pair.publish()
    assert (first.meta_version, second.meta_version) == (1, 2)
    wait_until(lambda: pair.consumer.metadata(2), "the second is known")
    newest = pair.consumer.metadata()
    assert newest is not None
    assert newest.attributes == {"serial": "A8"}
    other = pair.publish(meta_version=1)
    assert other.meta_version == 1


def test_a_consumer_that_comes_later_learns_the_metadata(pair: Pair, client: Client) -> None:
    """It is sent again and again."""
    pair.producer.set_metadata({"serial": "A7"}, tags=["raw"])
    with client.consumer(pair.producer.stream_id) as late:
        wait_until(late.metadata, "the metadata are known")
        metadata = late.metadata(1)
        assert metadata is not None
        assert (metadata.attributes, metadata.tags) == ({"serial": "A7"}, ("raw",))


def test_metadata_of_another_producer_are_repeated_as_they_were(pair: Pair) -> None:
    """Versions, times and formats stay, and each is sent even where the next follows at once; later ones count on."""
    for version, text in ((7, b"a"), (5, b"b")):
        entries = (Attribute(key="serial", format="x/own", value=text),)
        message = DataSourceMeta(stream_id=1, meta_version=version, timestamp_ns=version, attributes=entries)
        pair.producer.repeat_metadata(message)
    assert pair.publish().meta_version == 5
    for version, text in ((7, b"a"), (5, b"b")):
        wait_until(lambda version=version: pair.consumer.metadata(version), "they are known")
        found = pair.consumer.metadata(version)
        assert found is not None
        assert (found.timestamp_ns, found.attributes, found.formats) == (version, {"serial": text}, {"serial": "x/own"})
    assert pair.producer.set_metadata({"own": 1}) == 6


def test_metadata_that_no_frame_can_name_are_not_repeated(pair: Pair) -> None:
    """Version 0 is none; what is too large belongs into a blob."""
    with pytest.raises(LocalProtocolError, match="1 to 2\\^32 - 2"):
        pair.producer.repeat_metadata(DataSourceMeta(stream_id=1, meta_version=0, timestamp_ns=1, attributes=()))
    entries = (Attribute(key="table", format="x", value=bytes(1 << 17)),)
    with pytest.raises(LocalProtocolError, match="publish_blob"):
        pair.producer.repeat_metadata(DataSourceMeta(stream_id=1, meta_version=1, timestamp_ns=1, attributes=entries))
    assert pair.publish().meta_version == 0


@pytest.mark.parametrize(
    "arguments",
    [({"é": 1},), ({"a": object()},), ({"tags": 1},), ({"a": 1}, {"tags": ["x,y"]}), ({"a": 1}, {"summary": "é"})],
    ids=["key", "value", "reserved", "tag", "summary"],
)
def test_metadata_that_cannot_travel_are_refused_and_change_nothing(pair: Pair, arguments: Any) -> None:
    """By the call that gave them; the version stays."""
    attributes, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with pytest.raises(LocalProtocolError):
        pair.producer.set_metadata(attributes, **options)
    assert pair.publish().meta_version == 0
    assert pair.producer.set_metadata({"fine": 1}) == 1


def test_metadata_larger_than_a_message_are_refused_and_other_leases_go_on(client: Client) -> None:
    """Large tables are blobs. The leases of this client stay, and the next metadata are sent."""
    pair = paired(client)
    leases = pair.producer.lease_id, pair.consumer.lease_id
    with pytest.raises(LocalProtocolError, match="blob"):
        pair.producer.set_metadata({"table": bytes(1 << 20)})
    version = pair.producer.set_metadata({"small": 1})
    wait_until(lambda: pair.consumer.metadata(version), "metadata go on")
    assert (pair.producer.lease_id, pair.consumer.lease_id) == leases


@pytest.mark.parametrize("checksum", [True, False])
def test_a_blob_reaches_those_who_are_there_and_those_who_come(pair: Pair, client: Client, checksum: bool) -> None:
    """Under the version that was current."""
    data = np.random.default_rng(1).bytes(300_000)
    version = pair.producer.set_metadata({"camera": 1})
    assert pair.producer.publish_blob(data, blob_type=3, checksum=checksum) == version
    wait_until(lambda: pair.consumer.blob(3), "the blob is there")
    assert pair.consumer.blob(3) == pair.consumer.blob(3, version) == data
    with client.consumer(pair.producer.stream_id) as late:
        wait_until(lambda: late.blob(3), "the blob is there too")
        assert late.blob(3) == data


def test_a_consumer_whose_qos_comes_first_gets_the_blobs_too(pair: Pair, outsider: Outsider) -> None:
    """They come on two streams, in any order."""
    pair.producer.publish_blob(b"flat field", blob_type=3)
    wait_until(lambda: pair.consumer.blob(3), "the blob was sent once")
    stranger = 4_242
    outsider.say(
        "qos",
        consumer_qos(pair.producer.stream_id, stranger, epoch=pair.producer.epoch or 0),
    )
    assert pair.producer.wait_for_consumers(2, 20)
    outsider.wait_for(DataSourceAnnounce, lambda it: it.stream_id == pair.producer.stream_id)
    outsider.received.clear()
    outsider.say("control", hello(stranger, pair.producer.stream_id))
    outsider.wait_for(MetaBlobComplete, lambda it: it.stream_id == pair.producer.stream_id)


def test_a_restarted_producers_blob_is_the_one_that_applies(client: Client) -> None:
    """Though it counts its versions from the beginning."""
    name = new_name()
    first = client.producer(name, create=True)
    consumer = client.consumer(first.stream_id)
    first.wait_for_consumers(1, 20)
    first.publish_blob(b"first", blob_type=1)
    wait_until(lambda: consumer.blob(1) == b"first", "the first is there")
    first.close()
    second = client.producer(name, create=True)
    second.publish_blob(b"second", blob_type=1)
    wait_until(lambda: consumer.blob(1) == b"second", "the second is there")


# --- who listens, and who has read


def test_a_producer_counts_its_consumers(pair: Pair, shared_client: Client) -> None:
    """Those that have its epoch mapped; waiting for more than there are has an end."""
    assert pair.producer.consumers == 1
    assert not pair.producer.wait_for_consumers(2, 0.05)
    with shared_client.consumer(pair.producer.stream_id):
        assert pair.producer.wait_for_consumers(2, 20)
        assert pair.producer.consumers == 2
    wait_until(lambda: pair.producer.consumers == 1, "the one that closed is gone")


def test_draining_waits_until_everything_was_read(pair: Pair) -> None:
    """And not longer."""
    assert pair.producer.drain(0.05)  # nothing was published
    for _ in range(3):
        pair.producer.publish(FRAME)
    assert not pair.producer.drain(0.05)
    reader = threading.Thread(target=lambda: [pair.consumer.poll(20) for _ in range(3)])
    reader.start()
    assert pair.producer.drain(20)
    reader.join()


def test_waiting_for_consumers_is_waiting_for_a_log_that_takes_descriptors(pair: Pair) -> None:
    """A consumer that listens would miss the next frame while the log is full, or not open yet."""

    def is_refused() -> bool:
        lost = pair.producer.stats.descriptors_lost
        while pair.producer.stats.descriptors_lost == lost:
            pair.producer.publish(FRAME)
        return not pair.producer.wait_for_consumers(1, 0)

    wait_until(is_refused, "a full log is no place for a frame")  # a log lets go of a sleeping reader after a while
    reader = threading.Thread(target=lambda: wait_until(lambda: pair.consumer.poll() is None, "all is read"))
    reader.start()
    assert pair.producer.wait_for_consumers(1, 20)
    reader.join()


def test_draining_waits_for_every_consumer(pair: Pair, shared_client: Client) -> None:
    """One that has read everything is not enough."""
    with shared_client.consumer(pair.producer.stream_id) as other:
        assert pair.producer.wait_for_consumers(2, 20)
        for _ in range(3):
            pair.producer.publish(FRAME)
        assert [pair.consumer.poll(20) is not None for _ in range(3)] == [True] * 3
        assert not pair.producer.drain(0.3)
        assert [other.poll(20) is not None for _ in range(3)] == [True] * 3
        assert pair.producer.drain(20)


def test_a_consumer_that_closes_is_gone_at_once(patient: tp.Local) -> None:
    """E28: with its lease, long before its silence would tell; its own stream is closed."""
    with patient.connect() as client, client.producer(20_100, create=True) as producer:
        endpoint = Endpoint("aeron:ipc?term-length=64k", 33_900)
        consumer = client.consumer(20_100, private_descriptors=endpoint)
        wait_until(lambda: producer._session.consumers.fan_out.descriptors, "the producer has opened a stream")
        (stream,) = producer._session.consumers.fan_out.descriptors
        consumer.close()
        wait_until(lambda: producer.consumers == 0 and stream.publication.is_closed, "the consumer is gone")


def test_a_rate_cap_leaves_room_for_so_many_frames() -> None:
    """A second has room for ten, evenly; a pause earns no burst; without a cap there is always room."""
    stream = PrivateStream(Endpoint("aeron:ipc", 1), None, 10)  # type: ignore[arg-type]
    due_ms = [at_ms for at_ms in range(5_000, 6_000, 7) if stream.is_due(at_ms * MS)]
    assert len(due_ms) == 10
    assert all(95 <= later - earlier <= 107 for earlier, later in itertools.pairwise(due_ms))
    assert [stream.is_due(at_ms * MS) for at_ms in (9_000, 9_001, 9_002, 9_100, 9_101)] == [
        *[True, False, False, True, False]
    ]
    stream.set_rate(0)
    assert stream.is_due(9_500 * MS)
    assert stream.is_due(9_500 * MS)


def test_draining_the_only_frame_waits_for_it_too(pair: Pair) -> None:
    """Seq 0 that was read is not the same as nothing read yet."""
    pair.producer.publish(FRAME)
    assert not pair.producer.drain(0.05)
    assert pair.consumer.poll(20) is not None
    assert pair.producer.drain(20)


def test_draining_without_consumers_is_done(client: Client) -> None:
    """`drain` does not wait for a consumer that is not there."""
    with client.producer(new_name(), create=True) as producer:
        producer.publish(FRAME)
        assert producer.drain(20)


def test_a_closed_producer_publishes_nothing(pair: Pair) -> None:
    """It says so, keeps its counts, and closing again is nothing."""
    pair.publish()
    pair.producer.close()
    pair.producer.close()
    with pytest.raises(Closed):
        pair.producer.publish(FRAME)
    with pytest.raises(Closed):
        pair.producer.claim((3,))
    assert pair.producer.stats.published == 1
    assert (pair.producer.epoch, pair.producer.max_frame_bytes, pair.producer.consumers) == (None, 0, 0)
    assert pair.producer.drain(1)
    assert not pair.producer.wait_for_consumers(1, 1)
