# SPDX-License-Identifier: Apache-2.0
"""A stream on its way from one host to another: producer, bridge, network, bridge, consumer; and the books of all.

    producer ─ left's memory ─ sender ═ relay ═ receiver ─ right's memory ─ consumer        (and a small stream back)

Everything is a process of its own. The relay, where one is asked for, repeats and delays datagrams; both media drivers
can lose them. `settle` stops the producer until everything has arrived or was counted; then a `Ledger` is balanced:

    produced = sent + dropped by the sender
    produced = published + dropped by the receiver + unseen: frames of which nothing arrived
    produced = received + dropped, as the consumer counts it in the end
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tests.support.driver_process import DriverProcess
from tests.support.frame_books import Book
from tests.support.hosts import SWITCH, BridgeEnd, Host, Network
from tests.support.processes import wait_until
from tests.support.stream_processes import Consuming, Producing

STREAM, ARRIVES_AS = 51_000, 52_000  # from left to right
BACK, BACK_ARRIVES_AS = 61_000, 62_000  # from right to left
PAYLOAD, CONTROL, METADATA = 40_101, 40_102, 40_103  # UDP ports there; back: a hundred more
LARGEST: Final = 16 << 20
NSLOTS: Final = 8
AGAIN_S: Final = 1.0
CHECK_EVERY_S: Final = 0.3
WITHIN_S: Final = 90.0


class Ledger(NamedTuple):
    """What was counted along the way between two moments at which nothing was under way."""

    produced: int
    sent: int
    sender_drops: Counter[str]
    published: int
    receiver_drops: Counter[str]
    received: int

    def __sub__(self, earlier: Ledger) -> Ledger:
        return Ledger(
            self.produced - earlier.produced,
            self.sent - earlier.sent,
            self.sender_drops - earlier.sender_drops,
            self.published - earlier.published,
            self.receiver_drops - earlier.receiver_drops,
            self.received - earlier.received,
        )

    @property
    def is_balanced(self) -> bool:
        return (
            self.produced == self.sent + self.sender_drops.total()
            and self.produced == self.published + self.receiver_drops.total()
            and self.sent >= self.published >= self.received
        )


class Way:
    """A stream from its producer, through two bridges, to a consumer of another host."""

    def __init__(self, producer: Producing, sender: BridgeEnd, receiver: BridgeEnd, consumer: Consuming) -> None:
        self.producer = producer
        self.sender = sender
        self.receiver = receiver
        self.consumer = consumer
        self._check_s = 0.0

    def check(self) -> None:
        """Checks now and then that no process has ended or reported an error."""
        if time.monotonic() < self._check_s:
            return
        self._check_s = time.monotonic() + CHECK_EVERY_S
        for part in (self.producer, self.sender, self.receiver, self.consumer):
            part.check()

    def wait_for_frames(self, count: int = 10, *, timeout_s: float = WITHIN_S) -> None:
        """The consumer receives, from the producer that is there now."""
        before = self.consumer.total
        with self._explained():
            wait_until(
                lambda: self.check() or (self.consumer.total >= before + count and self._is_of_this_producer()),
                f"{count} more frames than {before} arrive",
                timeout_s=timeout_s,
            )

    def settle(self) -> Ledger:
        """Stop the producer until all that it made has arrived or was counted. `producer.go_on()` afterwards."""
        self.producer.hold()
        again_s = time.monotonic() + AGAIN_S

        def has_arrived() -> bool:
            nonlocal again_s
            self.check()
            if (
                self.producer.is_still
                and self._is_of_this_producer()
                and self.consumer.last[1] == self.producer.last[1]
            ):
                return True
            if time.monotonic() > again_s:  # the last one was lost
                again_s = time.monotonic() + AGAIN_S
                self.producer.once()
            return False

        with self._explained():
            wait_until(has_arrived, "the last frame arrives", timeout_s=WITHIN_S)
        return self.ledger()

    def ledger(self) -> Ledger:
        sender, receiver = (end.counters(mapping=f"{STREAM}->{ARRIVES_AS}") for end in (self.sender, self.receiver))
        return Ledger(
            self.producer.last[1] + 1,
            sender["frames_sent", ""],
            _reasons(sender),
            receiver["frames_received", ""],
            _reasons(receiver),
            self.consumer.total,
        )

    def balance(self, since: Ledger) -> Ledger:
        """Settle, and wait for what is counted late: frames that were given up are, after the assembly timeout."""
        self.settle()
        found = self.ledger() - since

        def is_balanced() -> bool:
            nonlocal found
            found = self.ledger() - since
            return found.is_balanced

        with self._explained():
            wait_until(is_balanced, f"the books agree: {found}")
        return found

    def end_consumer(self) -> dict[str, Any]:
        """What it counted in the end: what it received and what it missed is all there was since its first frame."""
        self.settle()
        last = self.producer.last[1]
        (first,) = self.consumer.journal("first")
        assert not self.consumer.journal("crossed"), "this stream has had one epoch there"
        ended = self.consumer.end()
        counted = ended["received"] + sum(ended["drops"].values())
        assert counted == last + 1 - (first["seq"] - first["dropped"]), (ended, first, last)
        return ended

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds what each process knows to a failure."""
        try:
            yield
        except AssertionError as error:
            for end in (self.sender, self.receiver):
                error.add_note(f"{end.instance_id}: {dict(end.counters(mapping=f'{STREAM}->{ARRIVES_AS}'))}")
            for client in (self.producer, self.consumer):
                journal = "\n".join(map(str, client.journal()[-10:]))
                error.add_note(f"{client.name}: pid {client.pid}, {client.total} frames, last {client.last}\n{journal}")
            raise

    def _is_of_this_producer(self) -> bool:
        return self.consumer.book[Book.OF] == self.producer.pid


class Crossing(Way):
    """Two hosts and the stream between them.

    `policies` are those of both SHM drivers, `bridge` further keys of both bridges' `[bridge]`.
    """

    def __init__(
        self,
        folder: Path,
        undo: ExitStack,
        *,
        is_relayed: bool = False,
        rate_hz: float = 20.0,
        policies: Mapping[str, int] = MappingProxyType({}),
        **bridge: Any,
    ) -> None:
        self._rate_hz = rate_hz
        self.network = undo.enter_context(Network("left", "right"))
        hosts = {
            name: undo.enter_context(
                Host(folder, self.network, name, streams, nslots=NSLOTS, largest=LARGEST, policies=policies)
            )
            for name, streams in {"left": (STREAM, BACK_ARRIVES_AS), "right": (ARRIVES_AS, BACK)}.items()
        }
        self.left, self.right = hosts["left"], hosts["right"]
        self.relay = self._start_relay() if is_relayed else None
        here, there = self.left.address, self.right.address
        way = SWITCH if is_relayed else there
        keys = {"assembly_timeout_ms": 2_000, **bridge}
        there_mapping = {"source_stream_id": STREAM, "dest_stream_id": ARRIVES_AS}
        back_mapping = {"source_stream_id": BACK, "dest_stream_id": BACK_ARRIVES_AS}
        sender = self.left.bridge(
            {"instance_id": "left-bridge", **_sends_to(way), **_receives_at(here, 100), **keys},
            {**there_mapping, "direction": "send"},
            {**back_mapping, "direction": "receive"},
        )
        receiver = self.right.bridge(
            {"instance_id": "right-bridge", **_sends_to(here, 100), **_receives_at(there), **keys},
            {**there_mapping, "direction": "receive"},
            {**back_mapping, "direction": "send"},
        )
        for end in (sender, receiver):
            end.start()
        for end in (sender, receiver):
            end.wait_ready()
        super().__init__(self.produce(), sender, receiver, self.right.consume(ARRIVES_AS))
        self.wait_for_frames()

    def produce(self, **options: float) -> Producing:
        """At left, in place of the one before."""
        self.producer = self.left.produce(STREAM, **{"largest": LARGEST, "rate_hz": self._rate_hz, **options})
        return self.producer

    def set_loss(self, rate: float) -> None:
        """Of all datagrams, in both directions."""
        for host in (self.left, self.right):
            host.set_loss(rate)

    def set_disorder(self, **rates: float) -> dict[str, Any]:
        """`duplicate` and `reorder`; what the relay has seen and done so far."""
        assert self.relay is not None
        self.relay.write_line(json.dumps(rates))
        counts: dict[str, Any] = json.loads(self.relay.read_line())
        return counts

    def repaired(self) -> int:
        """Datagrams that Aeron sent again because they did not arrive."""
        return self.left.media_counters()["Retransmits sent"]

    def _start_relay(self) -> DriverProcess:
        ports = map(str, (PAYLOAD, CONTROL, METADATA))
        with self.network.inside("switch"):
            relay = self.left.run(DriverProcess("-m", "tests.support.udp_relay", SWITCH, self.right.address, *ports))
        assert relay.read_line() == "relays"
        return relay


@contextmanager
def crossing(folder: Path, **options: Any) -> Iterator[Crossing]:
    """Reaps every process afterwards."""
    with ExitStack() as undo:
        yield Crossing(folder, undo, **options)


def _reasons(counters: Counter[tuple[str, str]]) -> Counter[str]:
    reasons = Counter({reason: count for (name, reason), count in counters.items() if name == "frames_dropped"})
    return reasons + Counter(unseen=counters["frames_unseen", ""])


def _sends_to(address: str, more: int = 0) -> dict[str, Any]:
    return {
        "payload_channel": channel(address, PAYLOAD + more),
        "payload_stream_id": 50_001,
        "control_channel": channel(address, CONTROL + more),
        "control_stream_id": 50_002,
        "metadata_channel": channel(address, METADATA + more),
        "metadata_stream_id": 50_003,
    }


def _receives_at(address: str, more: int = 0) -> dict[str, Any]:
    names = ("payload_channel", "control_channel", "metadata_channel")
    return {f"receive_{name}": _sends_to(address, more)[name] for name in names}


def channel(address: str, port: int) -> str:
    """Large datagrams, and a window that the socket's buffer can hold, whatever this kernel allows."""
    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    buffer = min(most, 2 << 20) >> 10
    return f"aeron:udp?endpoint={address}:{port}|mtu=8k|so-rcvbuf={buffer}k|rcv-wnd={max(buffer // 4, 64)}k"
