# SPDX-License-Identifier: Apache-2.0
"""Clients, producers and consumers together, with a driver in this process: what their users see."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, DropReason, Frame, Producer, Progress, State, StateChange
from tensorpool.client.names import preferred_id
from tensorpool.driver import Driver, DriverConfig
from tensorpool.errors import (
    AttachRefused,
    Closed,
    ConfigError,
    DriverUnreachable,
    LocalProtocolError,
    TensorPoolError,
    TransportError,
)
from tensorpool.wire import Message, decode
from tensorpool.wire.control import (
    ConsumerConfig,
    DataSourceAnnounce,
    FrameProgressState,
    MetaBlobComplete,
    Mode,
    QosConsumer,
)
from tensorpool.wire.trace import TraceLinkSet
from tests.client.conftest import SMALL, STREAM, hello, new_name
from tests.support.processes import run_script, wait_until

FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)
_private_ids = itertools.count(33_000)


class Pair:
    """A producer and a consumer of one stream, in one client or two."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        self.producer = producer
        self.consumer = consumer

    def publish(self, array: np.ndarray[Any, Any] = FRAME, **options: Any) -> Frame:
        """Through both ends."""
        seq = self.producer.publish(array, **options)
        assert seq is not None
        frame = self.consumer.poll(20)
        assert frame is not None
        assert frame.seq == seq
        return frame


def paired(client: Client, **options: Any) -> Pair:
    """Of a stream of the test's own; the consumer misses nothing from now on."""
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, **options)
    assert producer.wait_for_consumers(1, 20)
    return Pair(producer, consumer)


@pytest.fixture
def pair(shared_client: Client) -> Iterator[Pair]:
    pair = paired(shared_client)
    yield pair
    pair.consumer.close()
    pair.producer.close()


class Outsider:
    """Somebody else on the streams of a deployment, with nothing but the codec."""

    def __init__(self, pool: tp.Local) -> None:
        self._client = aeron.connect(pool.aeron_dir)
        driver = pool.config.driver
        self._publications = {
            name: self._client.add_publication(endpoint.channel, endpoint.stream_id, exclusive=True)
            for name, endpoint in (("control", driver.control), ("qos", driver.qos), ("metadata", driver.metadata))
        }
        self._subscription = self._client.add_subscription(driver.metadata.channel, driver.metadata.stream_id)
        self.heard: list[Message] = []

    def say(self, name: str, message: Message) -> None:
        wait_until(lambda: self._publications[name].offer(message.encode()), "somebody takes a message")

    def wait_for[M: Message](self, kind: type[M], is_it: Callable[[M], bool]) -> M:
        """Of the metadata stream."""
        found: list[M] = []

        def is_there() -> bool:
            self._subscription.poll(lambda data, _: self.heard.append(decode(data)), 100)
            found.extend(it for it in self.heard if isinstance(it, kind) and is_it(it))
            return bool(found)

        wait_until(is_there, f"a {kind.__name__}")
        return found[0]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def outsider(pool: tp.Local) -> Iterator[Outsider]:
    outsider = Outsider(pool)
    yield outsider
    outsider.close()


# --- connecting


def test_without_a_media_driver_there_is_no_connection(shm_dir: Path) -> None:
    """At once, with words."""
    with pytest.raises(TransportError):
        tp.connect(str(shm_dir / "nobody"))


def test_a_configuration_that_is_made_takes_no_overrides(pool: tp.Local) -> None:
    """One or the other; the file's path goes with overrides."""
    with pytest.raises(ConfigError, match="overrides"):
        tp.connect(pool.aeron_dir, config=pool.config, overrides={"shm.namespace": "x"})


def test_a_client_reads_the_drivers_file(pool: tp.Local, tmp_path: Path) -> None:
    """Endpoints and directories are the same for both."""
    path = tmp_path / "pool.toml"
    path.write_text(f'[driver]\naeron_dir = "{pool.aeron_dir}"\n[shm]\nbase_dir = "{pool.config.shm.base_dir}"\n')
    with tp.connect(config=path) as client, client.consumer(STREAM) as consumer:
        assert consumer.is_active


def test_a_conductor_is_a_thread_or_invoked(pool: tp.Local) -> None:
    """Nothing else."""
    with pytest.raises(LocalProtocolError, match="'thread' or 'invoked'"):
        pool.connect(conductor="fiber")  # type: ignore[arg-type]


def test_with_a_media_driver_and_no_driver_it_is_unreachable(shared_media_driver: aeron.MediaDriver) -> None:
    """After the caller's own time, saying where it asked."""
    config = DriverConfig.load(environ={}, overrides={"driver.control_stream_id": 34_567})
    with tp.connect(shared_media_driver.aeron_dir, config=config) as client:
        with pytest.raises(DriverUnreachable) as caught:
            client.consumer(STREAM, timeout=0.1)
        assert caught.value.channel == config.driver.control.channel
        assert caught.value.waited_ns >= 100_000_000
        assert "is a driver running" in str(caught.value)


# --- streams


@pytest.mark.parametrize("stream", ["", "a\nb", "é", "x" * 257, 0, -1, 2**32 - 1, True, 1.0, None, b"x"])
def test_what_is_no_stream_is_refused(shared_client: Client, stream: Any) -> None:
    """A name, or an id from 1 to 2^32 - 2; nothing is asked of the driver."""
    for method in (shared_client.producer, shared_client.consumer):
        with pytest.raises(LocalProtocolError, match="stream"):
            method(stream)


def test_a_number_as_text_is_an_id(shared_client: Client) -> None:
    """As it comes from a command line."""
    with shared_client.consumer(str(STREAM)) as consumer:
        assert (consumer.stream_id, consumer.name) == (STREAM, None)


def test_a_configured_stream_needs_no_create(shared_client: Client) -> None:
    """For either role."""
    with shared_client.producer(STREAM) as producer, shared_client.consumer(STREAM) as consumer:
        assert producer.stream_id == consumer.stream_id == STREAM
        assert producer.epoch == consumer.epoch
        assert producer.max_frame_bytes == 65_536


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_an_unknown_stream_is_refused_in_the_drivers_words(shared_client: Client, role: str) -> None:
    """After the time that a producer on its way would have had."""
    with pytest.raises(AttachRefused) as caught:
        getattr(shared_client, role)(20_998, timeout=0.2)
    refusal = caught.value
    assert (refusal.code, refusal.stream, refusal.role) == ("REJECTED", 20_998, role.upper())
    assert refusal.words
    assert refusal.words in str(refusal)


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_request_that_can_never_be_granted_is_not_waited_for(shared_client: Client, role: str) -> None:
    """An id outside of the driver's range: refused at once, however much time there is."""
    with pytest.raises(AttachRefused) as caught:
        getattr(shared_client, role)(5, create=True, timeout=3600)
    assert caught.value.code == "INVALID_PARAMS"


@pytest.mark.parametrize("create", [True, False])
def test_a_consumer_may_create_a_stream_too(shared_client: Client, create: bool) -> None:
    """It is the driver's policy, and the caller's wish."""
    stream_id = 20_990
    if create:
        with shared_client.consumer(stream_id, create=True) as consumer:
            assert consumer.stream_id == stream_id
    else:
        with pytest.raises(AttachRefused):
            shared_client.consumer(20_991, timeout=0.1)


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_time_that_is_none_is_refused(shared_client: Client, timeout: float) -> None:
    """Nothing is asked of the driver."""
    with pytest.raises(LocalProtocolError, match="timeout"):
        shared_client.consumer(STREAM, timeout=timeout)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"},
        {"mode": "rate_limited"},
        {"mode": "rate_limited", "max_rate_hz": 0},
        {"max_rate_hz": -1},
        {"max_rate_hz": 2**32},
        {"max_rate_hz": 1.5},
        {"progress_interval_us": -1},
        {"progress_bytes_delta": 2**32 - 1},
        {"progress_major_delta_units": "3"},
        {"max_outstanding_seq_gap": -1},
        {"max_outstanding_seq_gap": 2**63},
        {"private_descriptors": Endpoint("", 5)},
        {"private_descriptors": Endpoint("aeron:ipc", -1)},
        {"private_control": Endpoint("aeron:ipc", 2**31)},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_by_name(shared_client: Client, options: dict[str, Any]) -> None:
    """With what is accepted; nothing is asked of the driver."""
    with pytest.raises(LocalProtocolError) as caught:
        shared_client.consumer(STREAM, **options)
    assert any(name in str(caught.value) for name in options)


@pytest.mark.parametrize("name", ["private_descriptors", "private_control"])
@pytest.mark.spec("WIRE-10.1.2-10", "WIRE-10.1.2-11")
def test_an_id_of_a_drivers_choosing_needs_a_driver_that_has_some(pool: tp.Local, name: str) -> None:
    """E22: without a range nobody would answer."""
    overrides = {**SMALL, "driver.descriptor_stream_id_range": [], "driver.control_stream_id_range": []}
    config = DriverConfig.load(environ={}, overrides=overrides | {"shm.base_dir": str(pool.config.shm.base_dir)})
    with tp.connect(pool.aeron_dir, config=config) as client, pytest.raises(LocalProtocolError, match=name):
        client.consumer(STREAM, **{name: Endpoint("aeron:ipc", 0)})  # type: ignore[arg-type]


# --- names


def test_a_stream_is_found_by_its_name(client: Client, shared_client: Client) -> None:
    """In this client and in another; its id is the name's own, so that it is the same after a restart."""
    name = new_name()
    with client.producer(name, create=True) as producer:
        assert producer.name == name
        assert producer.stream_id == preferred_id(name, client.config.driver.stream_id_range)
        for other in (client, shared_client):
            with other.consumer(name) as consumer:
                assert (consumer.stream_id, consumer.name) == (producer.stream_id, name)
                assert consumer.epoch == producer.epoch
        first = producer.stream_id
    with client.producer(name, create=True) as producer:
        assert producer.stream_id == first


def test_two_names_with_one_place_are_two_streams(client: Client, shared_client: Client) -> None:
    """The second goes to the next id that is nobody's, and each is found by its name."""
    ids = client.config.driver.stream_id_range
    places: dict[int, str] = {}
    for number in itertools.count():
        name = f"clash/{number}"
        other = places.setdefault(preferred_id(name, ids), name)
        if other != name:
            break
    with client.producer(other, create=True) as one, client.producer(name, create=True, timeout=20) as two:
        assert one.stream_id != two.stream_id
        assert (one.name, two.name) == (other, name)
        with shared_client.consumer(name) as consumer:
            assert consumer.stream_id == two.stream_id


def test_a_name_that_nobody_has_is_told(shared_client: Client) -> None:
    """With the name, and where to look."""
    with pytest.raises(TensorPoolError, match="no producer announces the name 'nobody/here'"):
        shared_client.consumer("nobody/here", timeout=0.2)


def test_a_name_that_two_streams_have_is_ambiguous(shared_client: Client, outsider: Outsider) -> None:
    """Both ids are told; either of them can be given."""
    name, is_over = new_name(), threading.Event()

    def announce() -> None:
        while not is_over.wait(0.05):
            for stream_id in (20_980, 20_981):
                outsider.say(
                    "metadata",
                    DataSourceAnnounce(stream_id=stream_id, producer_id=1, epoch=1, meta_version=0, name=name),
                )

    thread = threading.Thread(target=announce)
    with shared_client.consumer(STREAM):  # somebody listens
        thread.start()
        with pytest.raises(TensorPoolError, match=r"20980, 20981|20981, 20980"):
            shared_client.consumer(name, timeout=1)
        is_over.set()
        thread.join()


def test_a_consumer_waits_for_a_producer_of_that_name(client: Client, shared_client: Client) -> None:
    """As long as it was told to."""
    name = new_name()
    found: list[Consumer] = []
    waiter = threading.Thread(target=lambda: found.append(shared_client.consumer(name, timeout=30)))
    waiter.start()
    with client.producer(name, create=True) as producer:
        waiter.join(timeout=30)
        (consumer,) = found
        assert consumer.stream_id == producer.stream_id
        consumer.close()


# --- one producer


def test_a_stream_has_one_producer(client: Client, shared_client: Client) -> None:
    """The second is refused with who has it; when that one goes, it is granted."""
    name = new_name()
    first = client.producer(name, create=True)
    with pytest.raises(AttachRefused) as caught:
        shared_client.producer(first.stream_id, timeout=0.2)
    assert caught.value.code == "REJECTED"
    assert str(first.producer_id) in caught.value.words
    closing = threading.Thread(target=first.close)
    granted: list[Producer] = []
    asking = threading.Thread(target=lambda: granted.append(shared_client.producer(first.stream_id, timeout=30)))
    asking.start()
    closing.start()
    asking.join(timeout=30)
    (second,) = granted
    assert second.is_active
    second.close()


def test_a_refused_session_leaves_nothing_behind(client: Client) -> None:
    """Neither a lease nor a session that goes on asking."""
    for _ in range(3):
        with pytest.raises(AttachRefused):
            client.consumer(20_997, timeout=0.05)
    wait_until(lambda: not client._conductor._sessions, "the sessions are forgotten")


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
        np.zeros(2, np.float16),
        np.zeros(2, np.complex64),
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
        np.ma.masked_array([1.5, 2.5], [0, 1]),
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
@pytest.mark.parametrize("how", ["publish", "strided", "claim"])
def test_a_frame_that_fits_no_pool_is_dropped_and_counted(pair: Pair, how: str) -> None:
    """The loop goes on, and no seq is used up."""
    shape = (65_537,)
    if how == "claim":
        with pair.producer.claim(shape) as slot:
            assert slot.array.shape == shape
            slot.array[:] = 1
            assert slot.seq is None
    else:
        array = np.zeros(shape, np.uint8) if how == "publish" else np.zeros((65_537, 2), np.uint8)[:, 0]
        assert pair.producer.publish(array) is None
    assert pair.producer.stats.dropped == {DropReason.NO_POOL: 1}
    assert pair.publish().seq == 0


def test_parents_need_a_trace_and_nothing_is_published_without(pair: Pair, outsider: Outsider) -> None:
    """An error of the caller's has no effect but the error."""
    for array in (FRAME, np.zeros((4, 4))[::2]):
        with pytest.raises(LocalProtocolError, match="trace_id"):
            pair.producer.publish(array, parents=[1])
    assert pair.producer.stats.published == 0
    assert pair.publish().seq == 0


@pytest.mark.parametrize("parents", [[-1], [2**64], ["x"], range(30_000)], ids=["-1", "2^64", "text", "too many"])
def test_parents_that_cannot_travel_are_refused_and_nobody_else_suffers(
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


def test_waiting_has_an_end(pair: Pair) -> None:
    """poll gives None, wait gives False, latest nothing."""
    assert pair.consumer.poll() is None
    assert pair.consumer.poll(0.01) is None
    assert not pair.consumer.wait(0.01)
    assert not pair.consumer.wait(0)
    assert pair.consumer.latest() is None


def test_a_waiting_consumer_gets_a_frame_when_it_comes(pair: Pair) -> None:
    """By poll, by wait, by iteration; long before its time is over."""
    for wait in (lambda: pair.consumer.poll(60), lambda: pair.consumer.wait(60), lambda: next(pair.consumer)):
        results: list[Any] = []
        waiter = threading.Thread(target=lambda wait=wait, results=results: results.append(wait()))
        waiter.start()
        pair.producer.publish(FRAME)
        waiter.join(timeout=30)
        assert results
        assert results[0]
        while pair.consumer.poll() is not None:
            pass


def test_latest_is_the_newest_also_right_after_attaching(pair: Pair, shared_client: Client) -> None:
    """What was published before is there; older ones are SKIPPED."""
    for number in range(5):
        pair.producer.publish(FRAME + number)
    with shared_client.consumer(pair.producer.stream_id) as late:
        frame = late.latest()
        assert frame is not None
        assert frame.seq == 4
        again = late.latest()
        assert again is not None
        assert again.seq == 4
        assert late.stats.received == 1
    frame = pair.consumer.latest()
    assert frame is not None
    assert frame.seq == 4
    stats = pair.consumer.stats
    assert stats.received + stats.lost == 5
    assert stats.drops.get(DropReason.SKIPPED) == 4


def test_a_slow_consumer_counts_what_the_ring_took(pair: Pair) -> None:
    """Every frame, and says so with the next one that it gets."""
    pair.publish()
    for _ in range(100):
        pair.producer.publish(FRAME)
    frame = pair.consumer.poll(20)
    assert frame is not None
    assert frame.seq > 90
    assert frame.dropped_before == frame.seq - 1
    while pair.consumer.poll() is not None:
        pass
    stats = pair.consumer.stats
    assert stats.received + stats.lost == 101 == pair.producer.stats.published


def test_a_rate_limited_consumer_gets_fewer(shared_client: Client) -> None:
    """By the times of the frames; the rest is counted as what it asked for."""
    pair = paired(shared_client, mode="rate_limited", max_rate_hz=10)
    assert pair.consumer.mode is Mode.RATE_LIMITED
    for number in range(6):
        pair.producer.publish(FRAME, timestamp_ns=1_000_000_000 + number * 50_000_000)
    frames = [pair.consumer.poll(5) for _ in range(3)]
    assert [frame and frame.seq for frame in frames] == [0, 2, 4]
    assert pair.consumer.poll() is None
    stats = pair.consumer.stats
    assert (stats.received, stats.drops.get(DropReason.RATE_LIMITED)) == (3, 3)
    assert stats.drops_gap == 0
    pair.consumer.close()
    pair.producer.close()


# --- slots


def test_a_slot_is_filled_in_place(pair: Pair) -> None:
    """Published when the block is left, and nobody hears of it before."""
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
    """Nobody sees the frame, its seq is used again, and the error is the user's."""
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
    [((), np.uint8), ((1,) * 9, np.uint8), ((-1,), np.uint8), ((3,), np.float16), ((2**31,), np.uint8)],
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


def test_partial_frames_are_told_to_those_who_asked(client: Client) -> None:
    """STARTED, complete rows, COMPLETE; each prefix is what was written, and whole afterwards."""
    told: list[tuple[Progress, Any]] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(
        producer.stream_id,
        on_progress=lambda it: told.append((it, None if it.prefix is None else it.prefix.copy())),
        progress_bytes_delta=4096,
        progress_interval_us=1,
    )
    wait_until(lambda: producer._session.fan_out.policy, "the producer knows that somebody asked")
    with producer.claim((16, 4096), np.uint8, progress="rows") as slot:
        for row in range(16):
            slot.array[row] = row + 1

            def is_told(rows: int = row + 1) -> bool:
                slot.progress(rows=rows)
                consumer.poll()
                return bool(told) and told[-1][0].rows == rows

            wait_until(is_told, "the row is told")
            progress, prefix = told[-1]
            assert progress.state is FrameProgressState.PROGRESS
            assert (progress.seq, progress.epoch, progress.stream_id) == (0, producer.epoch, producer.stream_id)
            assert progress.is_intact()
            assert prefix.shape == (row + 1, 4096)
            assert (prefix == np.arange(1, row + 2)[:, None]).all()
    frame = consumer.poll(20)
    assert frame is not None
    assert told[0][0].state is FrameProgressState.STARTED
    wait_until(
        lambda: consumer.poll() is None and told[-1][0].state is FrameProgressState.COMPLETE, "the frame is complete"
    )
    assert progress.columns is None


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
    """It is told again and again."""
    pair.producer.set_metadata({"serial": "A7"}, tags=["raw"])
    with client.consumer(pair.producer.stream_id) as late:
        wait_until(late.metadata, "the metadata are known")
        metadata = late.metadata(1)
        assert metadata is not None
        assert (metadata.attributes, metadata.tags) == ({"serial": "A7"}, ("raw",))


@pytest.mark.parametrize(
    "arguments",
    [({"é": 1},), ({"a": object()},), ({"tags": 1},), ({"a": 1}, {"tags": ["x,y"]}), ({"a": 1}, {"summary": "é"})],
    ids=str,
)
def test_metadata_that_cannot_travel_are_refused_and_change_nothing(pair: Pair, arguments: Any) -> None:
    """By the call that gave them; the version stays."""
    attributes, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with pytest.raises(LocalProtocolError):
        pair.producer.set_metadata(attributes, **options)
    assert pair.publish().meta_version == 0
    assert pair.producer.set_metadata({"fine": 1}) == 1


def test_metadata_larger_than_a_message_are_refused_and_nobody_else_suffers(client: Client) -> None:
    """Large tables are blobs. The leases of this client stay, and the next metadata are told."""
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


def test_a_consumer_whose_qos_is_heard_first_gets_the_blobs_too(pair: Pair, outsider: Outsider) -> None:
    """They come on two streams, in any order."""
    pair.producer.publish_blob(b"flat field", blob_type=3)
    wait_until(lambda: pair.consumer.blob(3), "the blob was sent once")
    stranger = 4_242
    epoch = pair.producer.epoch or 0
    outsider.say(
        "qos",
        QosConsumer(
            stream_id=pair.producer.stream_id,
            consumer_id=stranger,
            epoch=epoch,
            last_seq_seen=0,
            drops_gap=0,
            drops_late=0,
            mode=Mode.STREAM,
        ),
    )
    assert pair.producer.wait_for_consumers(2, 20)
    outsider.wait_for(DataSourceAnnounce, lambda it: it.stream_id == pair.producer.stream_id)
    outsider.heard.clear()
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


def test_draining_the_only_frame_waits_for_it_too(pair: Pair) -> None:
    """Seq 0 that was read is not the same as nothing read yet."""
    pair.producer.publish(FRAME)
    assert not pair.producer.drain(0.05)
    assert pair.consumer.poll(20) is not None
    assert pair.producer.drain(20)


def test_draining_without_consumers_is_done(client: Client) -> None:
    """Nobody has to read."""
    with client.producer(new_name(), create=True) as producer:
        producer.publish(FRAME)
        assert producer.drain(20)


# --- leases that are lost


def test_a_revoked_consumer_comes_back_by_itself(client: Client, pool: tp.Local) -> None:
    """With another lease; its loop sees nothing but frames, and its callback what happened."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, on_state=seen.append)
    pair = Pair(producer, consumer)
    producer.wait_for_consumers(1, 20)
    pair.publish()
    before = consumer.lease_id
    assert before is not None
    pool.conductor.revoke(before)
    wait_until(lambda: consumer.is_active and consumer.lease_id not in (None, before), "there is another lease")
    frames: list[int] = []

    def is_through() -> bool:
        producer.publish(FRAME)
        frame = consumer.poll(0.05)
        frames.extend([frame.seq] if frame else [])
        return frame is not None

    wait_until(is_through, "frames flow again")
    consumer.poll()
    states = [change.state for change in seen]
    assert states[0] is State.ACTIVE
    assert State.WAITING in states
    assert states[-1] is State.ACTIVE
    assert any("REVOKED" in change.reason for change in seen)
    assert seen[-1].epoch == producer.epoch
    while consumer.poll() is not None:
        pass
    stats = consumer.stats
    assert stats.received + stats.lost == producer.stats.published
    consumer.close()
    assert seen[-1].state is State.CLOSED


def test_a_revoked_producer_comes_back_by_itself(client: Client, pool: tp.Local) -> None:
    """In a new epoch; what it could not publish meanwhile is counted, and its consumers follow."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True, on_state=seen.append)
    consumer = client.consumer(producer.stream_id)
    producer.wait_for_consumers(1, 20)
    Pair(producer, consumer).publish()
    lease, epoch = producer.lease_id, producer.epoch
    assert lease is not None
    assert epoch is not None
    given = 1
    pool.conductor.revoke(lease)

    def publish() -> bool:
        nonlocal given
        given += 1
        return producer.publish(FRAME) is not None and producer.epoch != epoch

    wait_until(publish, "frames go to a new epoch")
    assert producer.epoch is not None
    assert producer.epoch > epoch
    wait_until(lambda: consumer.epoch == producer.epoch, "the consumer follows")
    producer.publish(FRAME)
    given += 1
    wait_until(lambda: consumer.poll(0.05), "frames flow again")
    stats = producer.stats
    assert stats.published + sum(stats.dropped.values()) == given
    assert set(stats.dropped) <= {DropReason.DETACHED}
    assert stats.epochs == 2
    states = [change.state for change in seen]
    assert states[0] is State.ACTIVE
    assert State.WAITING in states
    assert states[-1] is State.ACTIVE


def test_a_slot_whose_lease_went_meanwhile_is_dropped(client: Client, pool: tp.Local) -> None:
    """It is never published into an epoch that has another owner."""
    with client.producer(new_name(), create=True) as producer:
        slot = producer.claim((3,))
        lease = producer.lease_id
        assert lease is not None
        pool.conductor.revoke(lease)
        wait_until(lambda: producer.lease_id not in (None, lease) and producer.is_active, "there is another lease")
        slot.array[:] = 1  # the memory is still there
        assert slot.commit() is None
        assert slot.seq is None
        assert producer.stats.dropped == {DropReason.DETACHED: 1}
        assert producer.publish(FRAME) == 0


def test_everything_comes_back_with_the_driver(media_driver: aeron.MediaDriver, shm_dir: Path) -> None:
    """It ends and another one begins: no exception in between, and every frame is accounted for."""
    overrides = SMALL | {
        "shm.base_dir": str(shm_dir / "regions"),
        "policies.announce_period_ms": 100,
        "policies.lease_keepalive_interval_ms": 100,
    }
    config = DriverConfig.load(environ={}, overrides=overrides)
    driver = Driver(config, aeron_dir=media_driver.aeron_dir)
    with tp.connect(media_driver.aeron_dir, config=config) as client:
        producer, consumer = client.producer(STREAM), client.consumer(STREAM)
        producer.wait_for_consumers(1, 20)
        Pair(producer, consumer).publish()
        before = producer.lease_id, consumer.lease_id
        driver.close()

        def is_lost() -> bool:
            consumer.poll()
            return producer.publish(FRAME) is None and consumer.epoch is None

        wait_until(is_lost, "the driver is missed")
        driver = Driver(config, aeron_dir=media_driver.aeron_dir)

        def is_back() -> bool:
            frame = consumer.poll(0.02) if producer.publish(FRAME) is not None else None
            return frame is not None and frame.epoch == producer.epoch

        wait_until(is_back, "frames flow again")
        assert producer.lease_id != before[0]
        assert consumer.lease_id != before[1]
        while consumer.poll() is not None:
            pass
        stats = consumer.stats
        assert stats.received + stats.lost == producer.stats.published
    driver.close()


# --- private streams, and being told not to use shared memory


@pytest.mark.parametrize("by", ["consumer", "driver"])
@pytest.mark.spec("WIRE-5-01", "WIRE-5-02")
def test_a_consumer_may_have_descriptors_of_its_own(client: Client, by: str) -> None:
    """On an id of its own choosing, or of the driver's; frames come as before, each once."""
    endpoint = Endpoint("aeron:ipc?term-length=64k", next(_private_ids) if by == "consumer" else 0)
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, private_descriptors=endpoint)
    wait_until(lambda: producer._session.fan_out.descriptors, "the producer has opened a stream")
    (private,) = producer._session.fan_out.descriptors
    if by == "consumer":
        assert private.endpoint == endpoint
    else:
        assert private.endpoint.stream_id in client.config.driver.descriptor_stream_id_range
    wait_until(lambda: private.publication.is_connected, "the consumer listens to it")
    wait_until(lambda: consumer._session._private == private.endpoint, "and to nothing else")
    pair = Pair(producer, consumer)
    for _ in range(10):
        pair.publish()
    assert consumer.stats.received == 10
    consumer.close()
    wait_until(lambda: not producer._session.fan_out.descriptors, "the stream is closed with its consumer")


def test_descriptors_of_its_own_have_the_time_of_publishing_too(client: Client) -> None:
    """Where the producer tells it on the shared stream."""
    producer = client.producer(new_name(), create=True, with_publish_time=True)
    consumer = client.consumer(
        producer.stream_id, private_descriptors=Endpoint("aeron:ipc?term-length=64k", next(_private_ids))
    )
    wait_until(
        lambda: any(it.publication.is_connected for it in producer._session.fan_out.descriptors),
        "the consumer listens to its own stream",
    )
    wait_until(lambda: consumer._session._private is not None, "and to nothing else")
    assert Pair(producer, consumer).publish().publish_timestamp_ns is not None


def test_a_private_stream_is_throttled_as_asked(client: Client) -> None:
    """E26-E28: the rate is kept by the producer, and what it leaves out is no gap."""
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(
        producer.stream_id,
        mode="rate_limited",
        max_rate_hz=1,
        private_descriptors=Endpoint("aeron:ipc?term-length=64k", next(_private_ids)),
    )
    wait_until(
        lambda: any(it.publication.is_connected for it in producer._session.fan_out.descriptors),
        "the consumer listens to its own stream",
    )
    wait_until(lambda: consumer._session._private is not None, "and to nothing else")
    pair = Pair(producer, consumer)
    pair.publish()
    for _ in range(5):
        producer.publish(FRAME)
    assert consumer.poll() is None
    assert consumer.stats.drops_gap == 0
    assert producer.stats.published == 6


@pytest.mark.parametrize("uri", ["aeron:udp?endpoint=host:1|stream=5", "bridge://lab", "", "http://x"])
@pytest.mark.spec("WIRE-10.1.3-03", "WIRE-10.1.3-06", "WIRE-15.12-02")
def test_a_consumer_that_is_told_not_to_use_shared_memory_falls_back(
    client: Client, outsider: Outsider, uri: str
) -> None:
    """And comes back when it is told otherwise; schemes that nobody defined are no fallback."""
    seen: list[StateChange] = []
    producer = client.producer(new_name(), create=True)
    consumer = client.consumer(producer.stream_id, on_state=seen.append)
    producer.wait_for_consumers(1, 20)
    pair = Pair(producer, consumer)
    pair.publish()
    told = ConsumerConfig(
        stream_id=consumer.stream_id,
        consumer_id=consumer.consumer_id,
        use_shm=False,
        mode=Mode.STREAM,
        descriptor_stream_id=0,
        control_stream_id=0,
        payload_fallback_uri=uri,
    )
    outsider.say("control", told)
    wait_until(lambda: consumer.state is State.FALLBACK, "the consumer falls back")
    assert consumer.fallback_uri == (uri if uri.startswith(("aeron:", "bridge:")) else None)
    producer.publish(FRAME)
    assert consumer.poll(0.01) is None
    assert consumer.epoch is None
    assert not consumer.is_active
    outsider.say("control", msgspec.structs.replace(told, use_shm=True, payload_fallback_uri=""))
    wait_until(lambda: consumer.is_active, "the consumer is back")
    assert consumer.fallback_uri is None
    wait_until(lambda: producer.publish(FRAME) is not None and consumer.poll(0.05), "frames flow again")
    assert [change.state for change in seen] == [State.ACTIVE, State.FALLBACK, State.WAITING, State.ACTIVE]


# --- conductors


def test_an_invoked_client_has_no_thread(pool: tp.Local) -> None:
    """Everything happens inside its own calls."""
    before = {thread for thread in threading.enumerate() if thread.name == "tensorpool-client"}
    with pool.connect(conductor="invoked") as client:
        producer = client.producer(new_name(), create=True)
        consumer = client.consumer(producer.stream_id)
        assert {thread for thread in threading.enumerate() if thread.name == "tensorpool-client"} == before
        assert producer.wait_for_consumers(1, 20)
        assert Pair(producer, consumer).publish().seq == 0
        assert isinstance(client.invoke(), int)
        producer.set_metadata({"a": 1})
        wait_until(lambda: client.invoke() is not None and consumer.metadata(), "the metadata are known")
        producer.close()
        consumer.close()
        assert (producer.state, consumer.state) == (State.CLOSED, State.CLOSED)


def test_an_invoked_consumer_that_always_has_frames_keeps_its_lease(shm_dir: Path) -> None:
    """Its polls turn the conductor, also when none of them has to wait."""
    overrides = SMALL | {"policies.lease_keepalive_interval_ms": 100}
    with tp.local(overrides=overrides) as pool, pool.connect() as client:
        producer = client.producer(new_name(), create=True)
        with pool.connect(conductor="invoked") as invoked:
            seen: list[StateChange] = []
            consumer = invoked.consumer(producer.stream_id, on_state=seen.append)
            lease = consumer.lease_id
            end_ns = time.monotonic_ns() + 2 * pool.config.lease_duration_ns
            while time.monotonic_ns() < end_ns:
                producer.publish(FRAME)
                producer.publish(FRAME)
                consumer.poll()
            assert consumer.lease_id == lease
            assert [change.state for change in seen] == [State.ACTIVE]


def test_a_client_with_a_thread_is_not_invoked(shared_client: Client) -> None:
    """One or the other."""
    with pytest.raises(LocalProtocolError, match="invoked"):
        shared_client.invoke()


# --- closing


def test_a_closed_client_gives_everything_back(pool: tp.Local, shared_client: Client) -> None:
    """Leases too: another may produce at once. Closing again is nothing."""
    client = pool.connect()
    pair = paired(client)
    stream_id = pair.producer.stream_id
    client.close()
    client.close()
    assert client.is_closed
    assert (pair.producer.state, pair.consumer.state) == (State.CLOSED, State.CLOSED)
    for make in (client.producer, client.consumer):
        with pytest.raises(Closed):
            make(stream_id)
    with shared_client.producer(stream_id, timeout=20) as other:
        assert other.is_active


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


def test_a_closed_consumer_ends_its_loops(pair: Pair) -> None:
    """Those that wait in other threads as well; frames stay what they were."""
    frame = pair.publish()
    ended: list[str] = []

    def loop() -> None:
        for _ in pair.consumer:
            pass
        ended.append("loop")

    reader = threading.Thread(target=loop)
    reader.start()
    pair.consumer.close()
    reader.join(timeout=30)
    assert ended == ["loop"]
    assert pair.consumer.poll() is None
    assert pair.consumer.poll(1) is None
    assert pair.consumer.latest() is None
    assert not pair.consumer.wait(1)
    assert list(pair.consumer) == []
    np.testing.assert_array_equal(frame.array, FRAME)
    assert frame.is_intact()
    assert pair.consumer.stats.received == 1
    pair.consumer.close()


def test_a_closed_client_ends_the_loops_of_its_consumers(pool: tp.Local) -> None:
    """Wherever they wait."""
    client = pool.connect()
    pair = paired(client)
    reader = threading.Thread(target=lambda: list(pair.consumer))
    reader.start()
    client.close()
    reader.join(timeout=30)
    assert not reader.is_alive()


def test_a_frame_outlives_its_client(pool: tp.Local) -> None:
    """Views keep their memory."""
    client = pool.connect()
    frame = paired(client).publish()
    view = frame.array
    client.close()
    np.testing.assert_array_equal(view, FRAME)
    np.testing.assert_array_equal(frame.copy(), FRAME)


def test_consumers_go_from_producer_to_producer(client: Client, shared_client: Client) -> None:
    """Each in an epoch of its own; every frame of all of them is accounted for."""
    name = new_name()
    published = 0
    consumer: Consumer | None = None
    for lap in range(3):
        with shared_client.producer(name, create=True, timeout=20) as producer:
            consumer = consumer or client.consumer(name)
            assert producer.wait_for_consumers(1, 20)
            for _ in range(lap + 2):
                producer.publish(FRAME)
            frame = consumer.poll(20)
            assert frame is not None
            assert frame.epoch == producer.epoch
            published += producer.stats.published
    assert consumer is not None
    ended = consumer
    wait_until(
        lambda: ended.poll(0.01) is None and ended.stats.received + ended.stats.lost == published,
        "everything is accounted for",
    )
    assert ended.stats.epochs >= 3


FORKED = """
import os, sys
import numpy as np
import tensorpool as tp

overrides = {
    "driver.stream_id_range": [20000, 20099],
    "profiles.default": {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 256}]},
}

def outcome(act):
    try:
        return type(act()).__name__
    except Exception as error:
        return type(error).__name__

with tp.local(overrides=overrides) as pool, pool.connect() as client:
    producer = client.producer("a", create=True)
    consumer = client.consumer("a")
    producer.wait_for_consumers(1, 20)
    producer.publish(np.arange(4))
    frame = consumer.poll(20)
    view = frame.array
    pid = os.fork()
    if pid == 0:
        # a view is plain memory; everything that needs the parent's threads is closed
        assert list(view) == [0, 1, 2, 3] and frame.is_intact()
        results = [
            outcome(lambda: producer.publish(np.arange(4) + 10)),
            outcome(lambda: producer.claim((4,))),
            outcome(lambda: consumer.poll(0.05)),
            outcome(lambda: consumer.latest()),
            outcome(lambda: client.consumer("a", timeout=0.2)),
        ]
        consumer.close()
        producer.close()
        client.close()
        print(*results, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    # the child touched neither the ring nor the leases
    assert producer.publish(np.arange(4) + 1) == 1
    frame = consumer.poll(20)
    assert frame.seq == 1 and list(frame.array) == [1, 2, 3, 4]
    assert consumer.stats.lost == 0
    print("parent", flush=True)
"""


def test_a_forked_child_uses_nothing_of_its_parents_but_views() -> None:
    """What was inherited is closed there, and ends without harm to the parent."""
    code, output = run_script(FORKED)
    assert code == 0, output
    child, parent = output.split("\n")[:2]
    publish, claim, poll, latest, attach = child.split()
    assert (publish, claim) == ("Closed", "Closed")
    assert poll in ("Closed", "NoneType")
    assert latest in ("Closed", "NoneType")
    assert attach in ("Closed", "DriverUnreachable")
    assert parent == "parent"


def test_a_forked_childs_loop_over_a_consumer_ends() -> None:
    """It has nobody who could ever bring a frame."""
    script = FORKED.replace("outcome(lambda: consumer.poll(0.05)),", "outcome(lambda: [len(list(consumer))] and None),")
    code, output = run_script(script, timeout_s=30)
    assert code == 0, output
