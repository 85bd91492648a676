# SPDX-License-Identifier: Apache-2.0
"""A hostile peer against a real client over real Aeron: `fuzz_client.py [--seconds 600] [--seed 1]`.

The peer sends valid messages with extreme fields, in any order and at a high rate: everything that a client receives,
with the ids, epochs and addresses that it reads from the wire. The client has a producer and a consumer on the attacked
stream, asks for streams meanwhile, and has a second stream beside it. What must hold:

- no handler of the client's conductor raises, and no turn takes longer than `LONGEST_TURN_NS`;
- memory stays bounded;
- the stream beside keeps flowing, and every frame of it is accounted for;
- the attacked stream flows again when the attack is over.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import itertools
import json
import random
import sys
import threading
import time
import types
import typing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tensorpool as tp
from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.errors import DecodeError, LocalProtocolError, TensorPoolError
from tensorpool.wire import Message, control, decode, discovery, driver
from tests.client.conftest import SMALL
from tests.support import messages

ATTACKED: Final = 10_000
BESIDE: Final = 10_001
LONGEST_TURN_NS: Final = 2_000_000_000
MOST_GROWTH_BYTES: Final = 96 << 20
BURST: Final = 300  # messages sent between two turns of the streams
FORGED: Final = 15  # new ones among them
PHASE_SECONDS: Final = 1.0
YOUNG_SECONDS: Final = 1.5  # so long after its start a driver ends where another one seems to be (K6)
ENDINGS: Final = (driver.ShmAttachResponse, driver.ShmDetachResponse, driver.ShmLeaseRevoked)
TERM: Final = "8m"  # the peer's messages have up to 1 MiB

CONFIG: Final[dict[str, Any]] = SMALL | {
    "streams.beside.stream_id": BESIDE,
    "policies.announce_period_ms": 1_000,
    "policies.lease_keepalive_interval_ms": 2_000,
}

EDGES: Final = tuple(1 << power for power in (0, 7, 8, 15, 16, 31, 32, 63, 64))
INTEGERS: Final = (*(edge + off for edge in EDGES for off in (-2, -1, 0, 1)), -(2**31), -(2**63))
TEXTS: Final = (
    "",
    "x",
    "\u2603 \u00e9\U0001f4a3",
    "x" * 300,
    "aeron:ipc",
    "aeron:ipc?term-length=64k",
    "aeron:ipc?term-length=1g|mtu=8k|alias=" + "z" * 500,
    "aeron:udp?endpoint=127.0.0.1:40971",
    "aeron:udp?endpoint=224.0.1.1:40972|interface=127.0.0.1",
    "aeron:udp?endpoint=|||===",
    "aeron:udp?endpoint=999.1.1.1:99999",
    "aeron-spy:aeron:ipc",
    "aeron:ipc?tether=true|session-id=7",
    "bridge://elsewhere/1",
    "shm:file?path=/etc/passwd",
    "shm:file?path=" + "/dev/shm/" + "a/" * 200,
    "shm:file?path=/dev/shm/../../proc/self/mem|require_hugepages=true",
    "\x00\n\r",
)


class Harvest:
    """What the peer reads from the wire, to be repeated where it hurts."""

    def __init__(self) -> None:
        self.trust = 0.6  # how often a field gets a value that was read before
        self.values: dict[str, list[Any]] = {}
        self.requests: dict[Endpoint, list[int]] = {}

    def take(self, message: Any) -> None:
        if isinstance(message, discovery.DiscoveryRequest):
            where = Endpoint(message.response_channel, message.response_stream_id)
            self.requests.setdefault(where, []).append(message.request_id)
            del self.requests[where][:-8]
        if getattr(message, "stream_id", ATTACKED) not in (0, ATTACKED):
            return
        for field in msgspec.structs.fields(type(message)):
            value = getattr(message, field.name)
            if isinstance(value, tuple):
                for entry in value:
                    if isinstance(entry, msgspec.Struct):
                        self.take(entry)
                continue
            kept = self.values.setdefault(field.name, [])
            if value not in kept:
                kept.append(value)
                del kept[:-16]


class Forge:
    """Makes valid messages of one kind with extreme fields."""

    def __init__(self, kind: type[Any], chance: random.Random, harvest: Harvest) -> None:
        self.kind = kind
        self._chance = chance
        self._harvest = harvest
        self._fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        self._groups: dict[str, Forge] = {}
        for name, annotation in self._fields.items():
            entry = _entry_of(annotation)
            if entry is not None:
                self._groups[name] = Forge(entry, chance, harvest)

    def value(self, name: str) -> Any:
        chance, annotation = self._chance, self._fields[name]
        if name in self._groups:
            count = 50 if chance.random() < 0.02 else chance.choice((0, 1, 1, 2, 3))
            return tuple(self._groups[name].entry() for _ in range(count))
        known = self._harvest.values.get(name)
        if known and chance.random() < self._harvest.trust:
            return chance.choice(known)
        options = [part for part in typing.get_args(annotation) if part is not types.NoneType] or [annotation]
        if types.NoneType in typing.get_args(annotation) and chance.random() < 0.2:
            return None
        kind = options[0]
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return chance.choice(list(kind))
        if kind is bool:
            return chance.random() < 0.9
        if kind is int:
            if "timestamp" in name and chance.random() < 0.5:
                return time.monotonic_ns()
            return chance.getrandbits(31) if chance.random() < 0.3 else chance.choice(INTEGERS)
        if kind is bytes:
            return b"z" * 60_000 if chance.random() < 0.02 else chance.choice((b"", b"\x00", chance.randbytes(300)))
        return "y" * 100_000 if chance.random() < 0.005 else chance.choice(TEXTS)

    def entry(self) -> Any:
        return self.kind(**{name: self.value(name) for name in self._fields})

    def message(self) -> bytes:
        """Encoded; fields that do not fit their type are drawn again."""
        fields = {name: self.value(name) for name in self._fields}
        if "stream_id" in fields and (fields["stream_id"] == BESIDE or self._chance.random() < 0.8):
            fields["stream_id"] = ATTACKED
        for _ in range(50):
            try:
                return bytes(self.kind(**fields).encode())
            except LocalProtocolError:
                for name in self._chance.sample(list(fields), max(1, len(fields) // 3)):
                    if name != "stream_id":
                        fields[name] = self.value(name)
        return b""


def _entry_of(annotation: Any) -> type[Any] | None:
    if typing.get_origin(annotation) is tuple:
        entry = typing.get_args(annotation)[0]
        if isinstance(entry, type) and issubclass(entry, msgspec.Struct):
            return entry
    return None


class Arm:
    """Messages of one kind: some are new, most are sent again, as they are."""

    def __init__(self, forge: Forge, publication: aeron.Publication) -> None:
        self.forge = forge
        self.publication = publication
        self.messages = [forge.message() for _ in range(8)]
        self._next = 0

    def renew(self) -> None:
        self.messages[self._next % len(self.messages)] = self.forge.message()
        self._next += 1


class Peer:
    """The hostile one: publications on every stream that a client reads."""

    def __init__(self, pool: tp.Local, seed: int) -> None:
        self._client = aeron.connect(pool.aeron_dir)
        self._chance = random.Random(seed)
        self.harvest = Harvest()
        self.sent: Counter[str] = Counter()
        endpoints = pool.config.driver
        kinds: dict[Endpoint, tuple[type[Any], ...]] = {
            endpoints.control: (
                driver.ShmAttachResponse, driver.ShmDetachResponse, driver.ShmLeaseRevoked,
                control.ShmPoolAnnounce, control.ConsumerHello, control.ConsumerConfig, control.FrameProgress,
            ),
            endpoints.descriptor: (control.FrameDescriptor,),
            endpoints.qos: (control.QosConsumer, control.QosProducer),
            endpoints.metadata: (
                control.DataSourceAnnounce, control.DataSourceMeta, control.MetaBlobAnnounce, control.MetaBlobChunk,
                control.MetaBlobComplete,
            ),
        }  # fmt: skip
        self._control = self._publish(endpoints.control)
        self._arms: list[Arm] = []
        for endpoint, group in kinds.items():
            publication = self._control if endpoint == endpoints.control else self._publish(endpoint)
            self._arms += [Arm(Forge(kind, self._chance, self.harvest), publication) for kind in group]
        self._phase = self._arms
        self._answer = Forge(discovery.DiscoveryResponse, self._chance, self.harvest)
        self._answers: dict[Endpoint, aeron.Publication] = {}
        received = dict.fromkeys([*kinds, pool.config.discovery.endpoint])
        self._ears = [self._client.add_subscription("aeron:ipc?tether=false", each.stream_id) for each in received]

    def turn_to(self) -> None:
        """Choose what to send from now on; half of the time nothing that ends a lease, so that others reach further."""
        is_patient = self._chance.random() < 0.5
        arms = [arm for arm in self._arms if not (is_patient and arm.forge.kind in ENDINGS)]
        self._phase = self._chance.sample(arms, self._chance.choice((1, 1, 2, 4, len(arms))))
        self.harvest.trust = self._chance.choice((0.3, 0.6, 0.9, 0.97))

    def strike(self, count: int) -> None:
        """Send `count` messages; what finds no room is dropped."""
        for ear in self._ears:
            ear.poll(self._hear, 100)
        for i in range(count):
            arm = self._chance.choice(self._phase)
            if i < FORGED:
                arm.renew()
            self._send(arm.publication, self._chance.choice(arm.messages), arm.forge.kind)
        for where, requests in list(self.harvest.requests.items()):
            if where not in self._answers and len(self._answers) < 8:
                self._answers[where] = self._client.add_publication(where.channel, where.stream_id, exclusive=True)
            if where in self._answers:
                self.harvest.values["request_id"] = requests
                self._send(self._answers[where], self._answer.message(), self._answer.kind)

    def relent(self, consumer_id: int) -> None:
        """A consumer that must not use shared memory waits for the next config."""
        config = messages.consumer_config(ATTACKED, consumer_id)
        self._control.offer(config.encode())

    def close(self) -> None:
        self._client.close()

    def _publish(self, endpoint: Endpoint) -> aeron.Publication:
        channel = f"aeron:ipc?term-length={TERM}" if endpoint.channel.startswith("aeron:ipc") else endpoint.channel
        return self._client.add_publication(channel, endpoint.stream_id, exclusive=True)

    def _send(self, publication: aeron.Publication, data: bytes, kind: type[Any]) -> None:
        if data and len(data) <= publication.max_message_length and publication.offer(data):
            self.sent[kind.__name__] += 1

    def _hear(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            message: Message = decode(data)
        except DecodeError:
            return
        if self._chance.random() < 0.2 or not isinstance(message, control.FrameDescriptor):
            self.harvest.take(message)


class Watchman:
    """Asks the conductor for a turn all the time, and notes how long it took and what it did wrong."""

    def __init__(self, client: tp.Client) -> None:
        self._conductor = client._conductor
        self.longest_ns = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            turned = threading.Event()
            asked_ns = time.monotonic_ns()
            self._conductor.order(functools.partial(_mark, turned))
            is_turned = False
            while not is_turned:
                is_turned = turned.wait(0.1)
                self.longest_ns = max(self.longest_ns, time.monotonic_ns() - asked_ns)
            self._is_over.wait(0.01)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


class Beside:
    """The stream that is not attacked: a frame at a time, each of which must arrive or be counted."""

    def __init__(self, client: tp.Client) -> None:
        self.changes: list[str] = []  # of state, with the reason
        note = lambda change: self.changes.append(f"{change.state}: {change.reason}")  # noqa: E731
        self.producer = client.producer(BESIDE, on_state=note)
        self.consumer = client.consumer(BESIDE, on_state=note)
        _wait(lambda: self.producer.wait_for_consumers(1, timeout=0.1), "the stream beside has a consumer")
        self._frame = np.zeros(16, np.int64)
        self.published = 0

    def exchange(self, count: int) -> None:
        for _ in range(count):
            self._frame[0] = self.published
            if self.producer.publish(self._frame) is not None:
                self.published += 1
        while (frame := self.consumer.poll(0)) is not None:
            assert frame.array[0] == frame.seq, (frame.array[0], frame.seq, self.changes)

    def settle(self) -> None:
        """Everything that was published is accounted for, and a frame published now is received."""

        def is_through() -> bool:
            seq = self.producer.publish(self._frame)
            self.published += seq is not None
            frame = self.consumer.poll(1)
            while frame is not None and frame.seq != seq:
                frame = self.consumer.poll(1)
            return seq is not None and frame is not None

        _wait(is_through, "a frame of the stream beside comes through")
        stats = self.consumer.stats
        assert stats.received + stats.lost == self.published, (stats, self.published)


def _mark(turned: threading.Event, now_ns: int) -> None:
    turned.set()


def _wait(is_met: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def resident_bytes() -> int:
    """Of this process alone: logs and rings are shared files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


def attack(seconds: float, seed: int) -> dict[str, Any]:
    """Runs the attack and returns what was seen. Raises AssertionError where an invariant does not hold."""
    begun = time.monotonic()
    with tp.local(overrides=CONFIG) as pool, pool.connect() as client:
        beside = Beside(client)
        producer = client.producer(ATTACKED)
        producer.publish_blob(b"b" * 200_000, blob_type=7)
        consumer = client.consumer(
            ATTACKED,
            on_progress=lambda progress: None,
            private_descriptors=Endpoint("aeron:ipc?term-length=64k", 0),
            private_control=Endpoint("aeron:ipc?term-length=64k", 0),
        )
        watchman = Watchman(client)
        peer = Peer(pool, seed)
        frame = np.zeros((8, 8), np.float32)
        time.sleep(max(0.0, begun + YOUNG_SECONDS - time.monotonic()))
        warm_bytes, turns, next_phase = 0, 0, PHASE_SECONDS
        started = time.monotonic()
        conductor = client._conductor
        for turns in itertools.count(1):
            elapsed = time.monotonic() - started
            if elapsed > seconds:
                break
            if not warm_bytes and elapsed > min(seconds / 3, 60):
                warm_bytes = resident_bytes()
            producer.publish(frame)
            while consumer.poll(0) is not None:
                pass
            consumer.latest()
            if elapsed > next_phase:
                next_phase = elapsed + PHASE_SECONDS
                peer.turn_to()
            peer.strike(BURST)
            beside.exchange(5)
            if turns % 50 == 0:
                threading.Thread(target=_discover, args=(client,), daemon=True).start()
            assert not conductor.failures, "a handler raised; the log says which"
            assert watchman.longest_ns < LONGEST_TURN_NS, f"a turn took {watchman.longest_ns / 1e9:.2f} s"
            grown = resident_bytes() - warm_bytes if warm_bytes else 0
            assert grown < MOST_GROWTH_BYTES, f"grew by {grown >> 20} MiB"
        ended_bytes = resident_bytes()
        beside.settle()

        def is_back() -> bool:
            peer.relent(consumer.consumer_id)
            seq = producer.publish(frame)
            got = consumer.poll(0.2)
            while got is not None and got.seq != seq:
                got = consumer.poll(0.2)
            return seq is not None and got is not None

        _wait(is_back, f"the attacked stream flows again ({producer.state}, {consumer.state})")
        peer.close()
        watchman.close()
        assert not conductor.failures, "a handler raised; the log says which"
        return {
            "seed": seed,
            "seconds": round(time.monotonic() - started, 1),
            "bursts": turns,
            "sent": dict(peer.sent),
            "longest_turn_ms": watchman.longest_ns // 1_000_000,
            "grown_mib": (ended_bytes - warm_bytes) / (1 << 20),
            "beside": {"published": beside.published, "lost": beside.consumer.stats.lost},
            "malformed": conductor.malformed,
        }


def _discover(client: tp.Client) -> None:
    with contextlib.suppress(TensorPoolError):  # a forged refusal is a refusal
        client.discover(timeout=1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    print(json.dumps(attack(options.seconds, options.seed), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
