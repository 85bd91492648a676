# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of a consumer or a producer, and a wall clock that jumps: others lose nothing, the stopped one recovers.

Every test ends with an audit of the consumers' books (tests/support/stream_processes.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.client import Client, State, StateChange
from tensorpool.clock import SystemClock
from tests.support.frame_books import Book
from tests.support.processes import Process, wait_until
from tests.support.stream_processes import Site, audit

STREAM = 43_000
RATE_HZ = 500
PAUSE_S = 5.0
DESCRIPTOR_BYTES = 96  # of the log, with Aeron's header
STALL_S = 0.2
SLACK_S = 0.8  # for a machine that is busy with something else
EVENTS_BYTES = (1 << 20) + 128  # the least that Aeron takes; the rest is its trailer
POLICIES = {"announce_period_ms": 1000, "lease_keepalive_interval_ms": 1000}


def published_within(term_bytes: int) -> int:
    """How many descriptors it takes to have a reader that stands still passed over, and more."""
    return term_bytes // 2 // DESCRIPTOR_BYTES


def site_with_log(folder: Path, term_bytes: int) -> Site:
    """A ring of two seconds; a descriptor log of `term_bytes`, of which publishers use half."""
    channel = f"aeron:ipc?term-length={term_bytes}"
    return Site(folder, [STREAM], nslots=1024, driver={"descriptor_channel": channel}, policies=POLICIES)


def test_a_stopped_consumer_costs_the_others_nothing_and_comes_back(shm_dir: Path) -> None:
    """5 s at 500 Hz: no other consumer misses a frame, no publish waits; it is passed over, listens anew, and counts.

    The log is so short that it must be passed over meanwhile, and so long that there is time for it.
    """
    term_bytes = 512 << 10
    with site_with_log(shm_dir, term_bytes) as site:
        producer = site.produce(STREAM, rate_hz=RATE_HZ)
        victim, *others = [site.consume(STREAM) for _ in range(3)]
        for consumer in (victim, *others):
            consumer.wait_for_more(50)
        begin_s, before = time.monotonic(), producer.total
        victim.pause()
        enough = max(published_within(term_bytes), round(PAUSE_S * RATE_HZ))
        wait_until(
            lambda: producer.total >= before + enough and time.monotonic() > begin_s + PAUSE_S,
            "the log of descriptors has passed the consumer that stands still",
            timeout_s=90,
        )
        victim.resume()
        victim.wait_for_more(100)
        assert victim.last[0] == producer.last[0]
        site.drain()
        truth = site.truth(STREAM)
        for consumer in others:
            ended = consumer.end()
            audit(consumer, truth, ended)
            before_the_first = consumer.journal("first")[0]["dropped"]
            kept_too_long = consumer.book[Book.SPOILT]  # views that it looked at again when the ring had come round
            assert sum(ended["drops"].values()) == before_the_first + kept_too_long, ended
        ended = victim.end()
        audit(victim, truth, ended)
        assert sum(ended["drops"].values()) > RATE_HZ, "it counts what it missed"
        produced = producer.end()
        assert produced["lost"] == 0, "no descriptor was dropped"
        assert produced["epochs"] == 1
        assert producer.book[Book.LONGEST_NS] < (STALL_S + SLACK_S) * 1e9, "publish never waits"
        print(
            f"longest publish {producer.book[Book.LONGEST_NS] / 1e6:.1f} ms, the one who stood still: {ended['drops']}"
        )


@pytest.mark.parametrize("logs", [3, 6], ids=["its lease lives on", "its lease expires too"])
def test_a_stopped_consumer_holds_up_a_short_descriptor_log_for_a_moment_only(shm_dir: Path, logs: int) -> None:
    """Where the log is full before the one who stands still is passed over: at most 0.2 s of descriptors are lost.

    The others count them as GAP, with nothing else lost. It listens anew, and all receive.
    """
    term_bytes, rate_hz = 128 << 10, 1000
    with site_with_log(shm_dir, term_bytes) as site:
        producer = site.produce(STREAM, rate_hz=rate_hz, largest=2048)
        victim, other = [site.consume(STREAM) for _ in range(2)]
        for consumer in (victim, other):
            consumer.wait_for_more(50)
        before = producer.total
        victim.pause()
        wait_until(lambda: producer.total >= before + logs * published_within(term_bytes), "the log is full for long")
        victim.resume()
        victim.wait_for_more(100)
        signs = ("descriptors_lost", "media_driver_lost")  # the latter if a slow machine had it stand still for 5 s
        assert any(sign in entry["text"] for entry in victim.journal("log") for sign in signs), "it was passed over"
        site.drain()
        truth = site.truth(STREAM)
        drops = {consumer.name: consumer.end() for consumer in (victim, other)}
        for consumer in (victim, other):
            audit(consumer, truth, drops[consumer.name])
        produced = producer.end()
        lost = drops[other.name]["drops"]
        assert lost.get("GAP", 0) == produced["lost"], "only frames whose descriptors were lost are missing"
        print(f"{produced['lost']} descriptors lost: {produced['lost'] / rate_hz * 1e3:.0f} ms")
        assert produced["lost"] / rate_hz < STALL_S + SLACK_S
        assert producer.book[Book.LONGEST_NS] < (STALL_S + SLACK_S) * 1e9, "publish never waits"


def test_a_stopped_producer_expires_and_comes_back_with_an_epoch_of_its_own(shm_dir: Path) -> None:
    """Its rival takes over and is not disturbed when it wakes up; when the rival ends, it is its turn again.

    It publishes nothing between waking up and the new lease: every frame of its books belongs to an epoch that was its
    own (`Truth` sees to it that no epoch has two producers), and consumers account for all of them.
    """
    with Site(shm_dir, [STREAM], nslots=1024, policies=POLICIES) as site:
        sleeper = site.produce(STREAM, rate_hz=RATE_HZ)
        consumer = site.consume(STREAM)
        consumer.wait_for_more(50)
        rival = site.produce(STREAM, rate_hz=RATE_HZ)
        first = sleeper.last[0]
        sleeper.pause()
        asleep = sleeper.total
        wait_until(lambda: consumer.check() or consumer.last[0] > first, "the rival takes over")
        second = consumer.last[0]
        sleeper.resume()
        sleeper.wait_for("state", state="WAITING")
        consumer.wait_for_more(300)
        assert sleeper.total - asleep <= 1, "one may have been under way"
        assert consumer.last[0] == rival.last[0] == second, "the rival's epoch goes on"
        rival.end()
        wait_until(lambda: consumer.check() or consumer.last[0] > second, "the first one is back")
        consumer.wait_for_more(50)
        assert consumer.last[0] == sleeper.last[0]
        site.drain(consumer)
        assert set(sleeper.book.frames()) == {first, sleeper.last[0]}
        truth = site.truth(STREAM)
        if sleeper.total > asleep:  # it was stopped amid a publish: committed before or after, its epoch was over
            truth = truth._replace(frames=truth.frames | {first: truth.frames[first] - 1}, one_more=frozenset({first}))
        audit(consumer, truth, consumer.end())
        assert sleeper.end()["epochs"] == 2


class SteppingClock(SystemClock):
    """The host's clock, but the wall clock jumps by hours with every look at it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def realtime_ns(self) -> int:
        return super().realtime_ns() + self._chance.randrange(-(10**14), 10**14)


def test_steps_of_the_wall_clock_change_nothing() -> None:
    """Jumps of up to a day in either direction, all the time: no lease, no mapping and no frame is lost."""
    settings = {"policies.announce_period_ms": 700, "policies.lease_keepalive_interval_ms": 700}
    with tp.local(overrides=settings) as pool:
        changes: list[StateChange] = []
        with (
            Client(pool.config, pool.aeron_dir, clock=SteppingClock(1)) as publishing,
            Client(pool.config, pool.aeron_dir, clock=SteppingClock(2)) as reading,
            publishing.producer(20_000, create=True, on_state=changes.append) as producer,
            reading.consumer(20_000, on_state=changes.append) as consumer,
        ):
            assert producer.wait_for_consumers(1, timeout=60)
            first = producer.lease_id, consumer.lease_id, producer.epoch, consumer.epoch
            until_s = time.monotonic() + 4.5  # six periods, two leases
            count = 0
            while time.monotonic() < until_s:
                assert producer.publish(np.full(100, count % 251, np.uint8)) == count
                frame = consumer.poll(timeout=60)
                assert frame is not None
                time.sleep(0.0005)  # as fast as it goes, a media driver that is descheduled would cost a descriptor
                assert frame.seq == count
                assert frame.array[0] == count % 251
                count += 1
            assert (producer.lease_id, consumer.lease_id, producer.epoch, consumer.epoch) == first
            assert consumer.stats.received == producer.stats.published == count
            assert consumer.stats.lost == 0
            assert [change.state for change in changes if change.state is not State.ACTIVE] == []


def test_a_process_that_missed_the_media_drivers_events_connects_anew(shm_dir: Path) -> None:
    """A consumer stands still while a new producer comes and the media driver's buffer of events overflows.

    Aeron goes on without the events that it missed, so the consumer would never have the new producer's image.
    """
    patient = ("client_liveness_timeout_ns=60000000000", "publication_unblock_timeout_ns=70000000000")
    settings = (f"to_clients_buffer_length={EVENTS_BYTES}", *patient)
    with Site(shm_dir, [STREAM], media=settings, policies=POLICIES) as site:
        first = site.produce(STREAM, rate_hz=50)
        consumer = site.consume(STREAM)
        consumer.wait_for_more(10)
        consumer.pause()
        first.end()
        second = site.produce(STREAM, rate_hz=50)
        second.wait_for_more(1)
        overflow_events(site.deployment.aeron_dir, EVENTS_BYTES)
        consumer.resume()
        consumer.wait_for_more(10)
        assert consumer.last[0] == second.last[0]
        site.drain()
        audit(consumer, site.truth(STREAM), consumer.end())
        texts = [entry["text"] for entry in consumer.journal("log")]
        assert any("missed events of the media driver" in text for text in texts), "\n".join(texts)


def overflow_events(aeron_dir: str, buffer_bytes: int) -> None:
    """Have the media driver send more events than its buffer holds: each subscription is sent each publication."""
    least_bytes = 100  # of an event: it names a log file
    with contextlib.closing(aeron.connect(aeron_dir)) as client:
        subscriptions = [client.add_subscription("aeron:ipc", 4711) for _ in range(150)]
        for _ in range(2 * buffer_bytes // (len(subscriptions) * least_bytes)):
            client.add_publication("aeron:ipc?term-length=64k", 4711, True).close()


def test_a_process_that_stood_still_polls_nothing_before_it_connects_anew(media_driver: aeron.MediaDriver) -> None:
    """Its counters may be others' by now: the positions that it would write there hide messages from their readers.

    Aeron's own thread notices that its time is over, but not always before the thread that polls.
    """
    with (
        contextlib.closing(aeron.connect(media_driver.aeron_dir)) as client,
        Process("-c", IDLE_READER, media_driver.aeron_dir) as reader,
    ):
        assert reader.read_line() == "ready"
        publication = client.add_publication("aeron:ipc?term-length=64k", 4712, True)
        wait_until(lambda: publication.is_connected, "the reader is connected")
        assert publication.offer(b"unread")
        begin_s = time.monotonic()
        os.kill(reader.pid, signal.SIGSTOP)
        wait_until(lambda: time.monotonic() > begin_s + 4.2, "so long that a media driver may give its counters away")
        os.kill(reader.pid, signal.SIGCONT)
        reader.write_line("poll")
        assert reader.read_line() == "TransportError 0 True"


IDLE_READER = """
import sys
from tensorpool import aeron
client = aeron.connect(sys.argv[1])
client.expect_polls()
subscription = client.add_subscription("aeron:ipc", 4712)
print("ready", flush=True)
sys.stdin.readline()
found = []
try:
    while not subscription.poll(lambda data, info: found.append(data), 10):
        pass
    print("polled", len(found), client.has_missed_events, flush=True)
except Exception as error:
    print(type(error).__name__, len(found), client.has_missed_events, flush=True)
sys.stdin.readline()
"""
