# SPDX-License-Identifier: Apache-2.0
"""A slower copy of a stream: what is kept of its frames, what is counted, and across epochs of the source."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.client.rate_limiter import Gate, RateLimiter
from tests.support.processes import wait_until

_names = itertools.count()


@pytest.fixture
def names() -> tuple[str, str]:
    number = next(_names)
    return f"limit/fast/{number}", f"limit/slow/{number}"


@given(st.floats(0.1, 1000), st.lists(st.integers(0, 400_000_000), min_size=1, max_size=200))
def test_a_gate_never_lets_more_pass_than_its_rate(rate_hz: float, steps_ns: list[int]) -> None:
    """In any span of time: one more than the rate times the span, and one for a frame that was late."""
    gate = Gate(rate_hz)
    passed = [now_ns for now_ns in itertools.accumulate(steps_ns) if gate.admits(now_ns)]
    for (first, begin_ns), (last, end_ns) in itertools.combinations(enumerate(passed), 2):
        assert last - first + 1 <= math.floor((end_ns - begin_ns) * rate_hz / 1e9 + 1e-6) + 2


def test_a_gate_keeps_the_rate_of_frames_that_come_a_little_late() -> None:
    """30 Hz with jitter through 10 Hz: ten a second, not seven."""
    gate = Gate(10)
    times_ns = [number * 1_000_000_000 // 30 + (number % 3) * 900_000 for number in range(300)]
    assert sum(map(gate.admits, times_ns)) in (99, 100, 101)


@contextmanager
def running(limiter: RateLimiter) -> Iterator[RateLimiter]:
    """Steps on a thread of its own."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            limiter.step(0.05)

    with limiter:
        thread = threading.Thread(target=run, name="limiter")
        thread.start()
        try:
            yield limiter
        finally:
            is_over.set()
            thread.join()


def pictures(producer: tp.Producer, first: int, count: int, pause_s: float) -> list[int]:
    """Their timestamps, by which consumers keep a rate."""
    stamps = []
    for number in range(first, first + count):
        stamps.append(time.monotonic_ns())
        producer.publish(np.full((3, 5), number, np.uint16), timestamp_ns=stamps[-1])
        time.sleep(pause_s)
    return stamps


def test_frames_keep_what_they_are(client: Client, names: tuple[str, str]) -> None:
    """Seq, timestamp, UTC time, payload, metadata; every frame of the source is published, skipped or lost."""
    fast, slow = names
    with client.producer(fast, create=True) as producer:
        version = producer.set_metadata({"exposure_ms": 4, "raw": b"\x00\x01"}, tags=["lab"])
        with running(RateLimiter(client, fast, slow, rate_hz=50)) as limiter:
            assert producer.wait_for_consumers(1, 10)
            stamps = pictures(producer, 0, 1, 0)
            with client.consumer(slow, timeout=10) as consumer:
                wait_until(lambda: consumer.is_active, "the copy has a reader")
                stamps += pictures(producer, 1, 120, 0.003)
                wait_until(lambda: limiter.counts.received + limiter.counts.skipped + limiter.counts.lost == 121, "all")
                counts = limiter.counts
                frames = list(iter(lambda: consumer.poll(0.2), None))
                assert [frame.timestamp_ns for frame in frames] == [stamps[frame.seq] for frame in frames]
                assert all((frame.copy() == frame.seq).all() for frame in frames[-4:])
                assert {frame.meta_version for frame in frames} == {version}
                metadata = consumer.metadata(version)
                assert metadata is not None
                assert dict(metadata.attributes) == {"exposure_ms": 4, "raw": b"\x00\x01"}
                assert metadata.tags == ("lab",)
                assert frames[-1].time is not None
                assert abs(frames[-1].time.timestamp() - time.time()) < 60
    assert counts.skipped > 0
    assert counts.lost == 0
    assert counts.published + sum(counts.dropped.values()) == counts.received
    assert counts.published < 121 * 0.9


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float16).reshape(3, 4),
        np.arange(12).astype(ml_dtypes.bfloat16),
        np.asfortranarray(np.arange(12, dtype=np.int32).reshape(3, 4)),
        np.array([1 + 2j, 3], np.complex64),
        np.zeros((0, 4), np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_every_dtype_passes(client: Client, names: tuple[str, str], array: np.ndarray) -> None:
    fast, slow = names
    with client.producer(fast, create=True) as producer, RateLimiter(client, fast, slow, rate_hz=0.5) as limiter:
        assert producer.wait_for_consumers(1, 10)
        assert producer.publish(array) == 0
        assert limiter.step(10)
        with client.consumer(slow, timeout=10) as consumer:
            wait_until(lambda: consumer.latest() is not None, "the frame is there")
            frame = consumer.latest()
            assert frame is not None
            assert (frame.shape, frame.numpy_dtype, frame.order) == (
                array.shape,
                array.dtype.name,
                "F" if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous else "C",
            )
            np.testing.assert_array_equal(frame.copy(), array)
        assert producer.publish(array) == 1
        assert not limiter.step(0.5)
        assert limiter.counts.skipped + limiter.counts.lost == 1


def test_an_epoch_of_the_source_is_an_epoch_of_the_copy(client: Client, names: tuple[str, str]) -> None:
    """A producer that starts again starts at seq 0: so does the copy, and its reader goes on."""
    fast, slow = names
    client.producer(fast, create=True).close()
    with running(RateLimiter(client, fast, slow, rate_hz=1000, timeout=30)):
        seen: list[tuple[int, int]] = []
        consumer = None
        for _ in range(2):
            with client.producer(fast, create=True, timeout=10) as producer:
                assert producer.wait_for_consumers(1, 10)
                pictures(producer, 0, 1, 0)
                consumer = consumer or client.consumer(slow, timeout=10)
                before = len({epoch for epoch, _ in seen})
                for number in itertools.count(1):
                    pictures(producer, number, 1, 0.01)
                    if (frame := consumer.poll(0.05)) is not None:
                        seen.append((frame.epoch, frame.seq))
                        if len({epoch for epoch, _ in seen}) > before:
                            break
                    assert number < 2_000
        assert consumer is not None
        consumer.close()
    assert seen == sorted(seen)


def test_frames_that_grow_get_a_larger_ring(client: Client, names: tuple[str, str]) -> None:
    """As another epoch, to which a reader follows: no frame is lost, and seqs go on."""
    fast, slow = names
    sizes = [10_000, 200_000, 100_000, 500_000]  # the default profile of the deployment ends at 65,536
    with (
        client.producer(fast, create=True, max_frame_bytes=max(sizes), slots=8) as producer,
        RateLimiter(client, fast, slow, rate_hz=1_000_000) as limiter,
    ):
        assert producer.wait_for_consumers(1, 10)
        producer.publish(np.zeros(sizes[0], np.uint8), trace_id=1)
        assert limiter.step(10)
        with client.consumer(slow, timeout=10) as consumer:
            wait_until(lambda: consumer.latest() is not None, "the copy has a reader")
            epochs, seqs = set(), []
            for number, size in enumerate(sizes[1:], 1):
                producer.publish(np.full(size, number, np.uint8), trace_id=number + 1)
                assert limiter.step(10), limiter.counts
                frame = consumer.poll(10)
                assert frame is not None
                assert frame.trace_id == number + 1
                np.testing.assert_array_equal(frame.copy(), np.full(size, number, np.uint8))
                epochs.add(frame.epoch)
                seqs.append(frame.seq)
        assert seqs == [1, 2, 3]
        assert len(epochs) == 2
        assert (limiter.counts.published, limiter.counts.dropped) == (4, {})


def test_wrong_arguments_are_refused(client: Client, names: tuple[str, str]) -> None:
    fast, slow = names
    for rate_hz in (0, -1, math.nan, math.inf):
        with pytest.raises(tp.LocalProtocolError, match="rate_hz"):
            RateLimiter(client, fast, slow, rate_hz=rate_hz)
    with pytest.raises(tp.LocalProtocolError, match="another stream"):
        RateLimiter(client, fast, fast, rate_hz=1)
