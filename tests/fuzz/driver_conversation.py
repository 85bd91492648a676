# SPDX-License-Identifier: Apache-2.0
"""Whole conversations with the driver's conductor: valid messages with extreme fields, and what must hold after each.

The conductor is the real one with its decisions, its outbox and its failures; its transport and its memory are
stand-ins, so that a conversation of thousands of messages takes a second and repeats by its seed.

    python -m tests.fuzz.driver_conversation --seconds 600 [--seed N]
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, cast

from tensorpool import aeron
from tensorpool.clock import ManualClock
from tensorpool.driver import outbox
from tensorpool.driver.conductor import DriverConductor
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.lifecycle import MAX_PENDING_ATTACHES
from tensorpool.driver.memory import Created, Failed
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ConsumerConfig, Mode, ShmPoolAnnounce
from tensorpool.wire.discovery import DiscoveryRequest
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support.messages import announce, consumer_config, hello
from tests.support.processes import private_directory

FRONT, REAR = 10_000, 10_001
GOOD_CLIENT: Final = 7_000_000
TOKEN: Final = "sesame"
MAX_LEASES, MAX_MESSAGE = 40, (256 << 10) // 8
MS: Final = 1_000_000
U32, U64 = 2**32 - 1, 2**64 - 1
STEPS: Final = 300  # of one conversation
URI_BYTES: Final = 4095

OVERRIDES: Final[dict[str, Any]] = {
    "driver.control_channel": "aeron:ipc?term-length=256k",
    "driver.stream_id_range": [20_000, 20_003],
    "driver.descriptor_stream_id_range": [31_000, 31_003],
    "driver.control_stream_id_range": [32_000, 32_001],
    "policies.allow_dynamic_streams": True,
    "policies.max_leases": MAX_LEASES,
    "policies.shutdown_token": TOKEN,
    "profiles.default": {"header_nslots": 4, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]},
    "streams.front.stream_id": FRONT,
    "streams.rear.stream_id": REAR,
}


INFO: Final = SimpleNamespace(session_id=1)  # of every message: all clients publish in one session


class Log:
    """A publication: keeps what it takes, has no room while it is held."""

    max_message_length = MAX_MESSAGE
    holders = ()
    renewals = 0

    def __init__(self) -> None:
        self.is_held = False
        self.taken: list[bytes] = []

    def offer(self, data: bytes) -> aeron.OfferResult:
        assert len(data) <= MAX_MESSAGE, "Aeron raises for this"
        if self.is_held:
            return aeron.OfferResult.BACK_PRESSURED
        self.taken.append(data)
        return aeron.OfferResult.ACCEPTED

    def refresh_holders(self) -> None:
        pass


class Streams:
    """The control stream: hands over what clients sent. Stands for the Aeron client, too."""

    is_closed = has_missed_events = False
    holders = ()
    renewals = 0

    def __init__(self) -> None:
        self.answers = self.announces = Log()
        self.requests = self.backlog = self
        self.inbox: deque[bytes] = deque()

    def poll(self, handler: Callable[[bytes, object], object], limit: int) -> int:
        taken = [self.inbox.popleft() for _ in range(min(limit, len(self.inbox)))]
        for data in taken:
            handler(data, INFO)
        return len(taken)

    def is_own(self, _info: object) -> bool:
        return False

    def contains(self, _info: object) -> bool:
        return False

    def on_polled(self, fragments: int, now_ns: int) -> None:
        pass

    def refresh_holders(self) -> None:
        pass

    def ring(self, bell: int) -> None:
        pass

    def close(self) -> None:
        pass


class Memory:
    """Makes epochs without memory, at once or later, or fails."""

    path = "/dev/shm/nowhere"

    def __init__(self) -> None:
        self._epoch = 0
        self._ordered: deque[CreateEpoch] = deque()
        self.fails = self.waits = False

    def submit(self, order: CreateEpoch) -> None:
        self._ordered.append(order)

    def take_finished(self) -> Created | Failed | None:
        if self.waits or not self._ordered:
            return None
        order = self._ordered.popleft()
        if self.fails:
            return Failed(order.stream_id, order.reserve, "no space \u2026" * 500)
        self._epoch += 1
        uri = f"shm:file?path=/dev/shm/{order.stream_id}/{self._epoch}/header.ring"
        uris = (uri,) * len(order.ring.pools)
        return Created(Epoch(order.stream_id, self._epoch, 1, order.ring, uri, uris), order.reserve)

    def drop(self, stream_id: int) -> None:
        pass

    def refresh_activity(self) -> None:
        pass

    def stamp_offset_ns(self) -> int:
        return 0

    def collect(self, _now_ns: int) -> int:
        return 0

    def close(self) -> None:
        pass


class MediaDriverLiveness:
    """The media driver never dies here."""

    def is_dead(self) -> bool:
        return False

    def forget(self) -> None:
        pass


class Conversation:
    """One driver, a well-behaved client, and other processes that send messages."""

    def __init__(self, config: DriverConfig, chance: random.Random) -> None:
        self.chance = chance
        self.messages = 0
        self.lease: int | None = None
        self.is_over = False
        self.clock = ManualClock(10**12, 10**18)
        self.conductor = DriverConductor(config, self.clock, "/dev/shm/nowhere")
        self.conductor._memory.close()
        self.memory = Memory()
        self.streams = Streams()
        self.conductor._memory = cast(Any, self.memory)
        connection = self.conductor._connection
        connection.streams = connection.client = cast(Any, self.streams)
        connection._liveness = cast(Any, MediaDriverLiveness())
        self.probe_id = self.clock.monotonic_ns()
        self.conductor._perform(self.conductor._other_drivers.on_start())
        self.conductor._perform(self.conductor.lifecycle.on_start(self.clock.monotonic_ns()))
        for _ in range(20):
            self.turn(config.announce_period_ns // 10)  # from then on it serves, whatever other drivers say
        self.attach()

    # --- the driver

    def turn(self, pause_ns: int = MS) -> list[Message]:
        """One turn; what was sent in it."""
        self.clock.advance(pause_ns)
        self.streams.answers.taken.clear()
        try:
            self.conductor.do_work()
        except aeron.AgentTerminated:
            self.is_over = True
            self.conductor.on_close()
        return [decode(data) for data in self.streams.answers.taken]

    def hear(self, data: bytes) -> None:
        """A message of anybody, and the turn that reads it."""
        self.messages += 1
        self.streams.inbox.append(data)
        self.turn()
        self.check()

    def check(self) -> None:
        """What holds after every step."""
        life = self.conductor.lifecycle
        assert life.counts["failures"] == 0
        assert len(self.conductor._outbox) <= outbox.MAX_MESSAGES + len(life.streams)
        assert self.conductor._outbox.size_bytes <= outbox.MAX_BYTES
        assert len(life.leases) <= MAX_LEASES
        assert len(life._pending) <= MAX_PENDING_ATTACHES
        assert len(life.streams) <= 2 + 4
        borrowers = {(lease.stream_id, lease.client_id) for lease in life.leases if lease.role is Role.CONSUMER}
        private = life.private_streams
        assert borrowers >= set(private._borrowers) | set(private._half_answered)
        assert max(len(private.descriptor_ids), len(private.control_ids)) <= len(private)
        overrides = [it.override for it in private._borrowers.values() if it.override is not None]
        assert all(len(override.payload_fallback_uri) <= URI_BYTES for override in overrides)
        node_ids = [life.node_ids.of(lease.client_id) for lease in life.leases]
        held = [node_id for node_id in node_ids if node_id is not None]
        assert len(set(held)) == len(held)
        assert len(held) <= len(life.node_ids) <= len(life.leases) + len(life._pending)
        producers = [lease.stream_id for lease in life.leases if lease.role is Role.PRODUCER]
        assert len(producers) == len(set(producers))
        if self.lease is not None:
            assert life.leases.get(self.lease) is not None, "no other client ends the lease of one that keeps it alive"

    # --- the well-behaved client

    def ask(self, request: Message) -> list[Message]:
        self.streams.inbox.append(request.encode())
        return self.turn()

    def attach(self) -> None:
        request = ShmAttachRequest(
            correlation_id=77,
            stream_id=FRONT,
            client_id=GOOD_CLIENT,
            role=Role.CONSUMER,
            expected_layout_version=0,
            max_dims=0,
            publish_mode=None,
            require_hugepages=HugepagesPolicy.UNSPECIFIED,
        )
        (answer,) = (it for it in self.ask(request) if isinstance(it, ShmAttachResponse))
        assert (answer.code, answer.correlation_id) == (ResponseCode.OK, 77), answer
        self.lease = answer.lease_id

    def keep_alive(self) -> None:
        assert self.lease is not None
        lease = self.conductor.lifecycle.leases.get(self.lease)
        assert lease is not None
        fields = {"lease_id": self.lease, "stream_id": FRONT, "client_id": GOOD_CLIENT, "role": Role.CONSUMER}
        self.ask(ShmLeaseKeepalive(client_timestamp_ns=0, **cast(Any, fields)))
        assert lease.expiry_ns > self.clock.monotonic_ns() + self.conductor.lifecycle.config.lease_duration_ns - MS

    def detach(self) -> None:
        assert self.lease is not None
        fields = {"lease_id": self.lease, "stream_id": FRONT, "client_id": GOOD_CLIENT, "role": Role.CONSUMER}
        said = self.ask(ShmDetachRequest(correlation_id=78, **cast(Any, fields)))
        mine = [it for it in said if isinstance(it, ShmDetachResponse) or getattr(it, "lease_id", 0) == self.lease]
        assert [type(it) for it in mine] == [ShmDetachResponse, ShmLeaseRevoked], "E9: the response, then the end"
        assert cast(ShmDetachResponse, mine[0]).code is ResponseCode.OK
        self.lease = None

    def is_served(self) -> None:
        """A client that behaves attaches, keeps alive and detaches, and streams are announced."""
        self.streams.answers.is_held = self.memory.waits = self.memory.fails = False
        self.turn()
        self.keep_alive()
        self.detach()
        self.turn()  # memory that was missing
        self.attach()
        period_ns = self.conductor.lifecycle.config.announce_period_ns
        said: list[Message] = []
        for _ in range(2):
            said += self.turn(period_ns)
            self.keep_alive()
        assert FRONT in {it.stream_id for it in said if isinstance(it, ShmPoolAnnounce)}

    # --- other clients

    def step(self) -> None:
        """Something happens."""
        chance = self.chance
        kind = chance.random()
        if kind < 0.04:
            self.streams.answers.is_held = not self.streams.answers.is_held
        elif kind < 0.06:
            self.memory.fails = not self.memory.fails
        elif kind < 0.08:
            self.memory.waits = not self.memory.waits
        elif kind < 0.10:
            leases = [it.lease_id for it in self.conductor.lifecycle.leases if it.lease_id != self.lease]
            self.conductor.revoke(chance.choice([*leases, 0, U64]), "x" * chance.choice((0, 5000)))
        elif kind < 0.2:
            pause_ns = chance.choice((0, 60 * MS, 500 * MS, 900 * MS, 2000 * MS))
            self.turn(pause_ns)
            self.keep_alive()
        else:
            for _ in range(chance.choice((1, 1, 2, 40))):
                self.hear(self.message())
        self.check()

    def message(self) -> bytes:
        """A message of another client: valid field by field."""
        chance = self.chance
        makers = (
            self._attach,
            self._attach,
            self._detach,
            self._keepalive,
            self._hello,
            self._hello,
            self._config,
            self._shutdown,
            self._announce,
            self._inquiry,
            self._response,
        )
        message = chance.choice(makers)()
        data = message.encode()
        return _with_bytes(data, chance) if chance.random() < 0.3 else data

    def _client_id(self) -> int:
        return self.chance.choice((0, 1, 2, 3, 4, U32, U32 - 1, 20_000, self.chance.randrange(5, 5_000)))

    def _stream_id(self) -> int:
        return self.chance.choice((0, 1, FRONT, FRONT, FRONT, REAR, 20_000, 20_001, 20_009, 31_000, U32, U32 - 1))

    def _text(self) -> str:
        chance = self.chance
        texts = (
            "",
            "aeron:ipc",
            "aeron:ipc",
            "aeron:ipc?term-length=64k",
            "aeron:udp?endpoint=localhost:1",
            "x" * 4096,
        )
        return chance.choice((*texts, "Z" * chance.choice((1, 40, 4095, 9_000, 31_000)), "aeron:ipc?alias=" + "Z" * 40))

    def _attach(self) -> Message:
        """In either dialect."""
        chance = self.chance
        fields: dict[str, Any] = {
            "correlation_id": chance.choice((0, 77, 78, -(2**63), 2**63 - 1, chance.randrange(9))),
            "stream_id": self._stream_id(),
            "client_id": self._client_id(),
            "role": chance.choice(list(Role)),
            "expected_layout_version": chance.choice((0, 0, 0, 1, 2, U32)),
            "publish_mode": chance.choice((None, *PublishMode)),
            "require_hugepages": chance.choice(list(HugepagesPolicy)),
        }
        if chance.random() < 0.5:
            return ShmAttachRequest(**fields, max_dims=chance.choice((0, 8, 255)))
        return ExtendedAttachRequest(**fields, desired_node_id=chance.choice((None, 0, 1, 5, U32 - 1)))

    def _of_lease(self) -> dict[str, Any]:
        """The fields of another client's lease, of ours with one of them wrong, or of none."""
        chance = self.chance
        leases = [it for it in self.conductor.lifecycle.leases if it.lease_id != self.lease]
        fields: dict[str, Any] = {
            "lease_id": chance.choice((0, 1, 2**63, U64 - 1, self.lease or 0)),
            "stream_id": self._stream_id(),
            "client_id": self._client_id(),
            "role": chance.choice(list(Role)),
        }
        if leases and chance.random() < 0.7:
            lease = chance.choice(leases)
            named = {name: getattr(lease, name) for name in fields}
            fields = named | ({} if chance.random() < 0.7 else {"client_id": self._client_id()})
        return fields

    def _detach(self) -> Message:
        return ShmDetachRequest(correlation_id=self.chance.choice((0, 77, 2**63 - 1)), **self._of_lease())

    def _keepalive(self) -> Message:
        return ShmLeaseKeepalive(client_timestamp_ns=self.chance.choice((0, U64 - 1)), **self._of_lease())

    def _consumer(self) -> tuple[int, int]:
        """A consumer with a lease, the well-behaved one among them, or anybody."""
        leases = list(self.conductor.lifecycle.leases)
        if leases and self.chance.random() < 0.7:
            lease = self.chance.choice(leases)
            return lease.stream_id, lease.client_id
        return self._stream_id(), self._client_id()

    def _hello(self) -> Message:
        chance = self.chance
        ids = (0, 0, 0, 1, 31_000, 1000, U32)
        return hello(
            *self._consumer(),
            supports_progress=chance.random() < 0.5,
            mode=chance.choice(list(Mode)),
            max_rate_hz=chance.choice((0, 1, 65535)),
            descriptor_stream_id=chance.choice(ids),
            control_stream_id=chance.choice(ids),
            descriptor_channel=self._text(),
            control_channel=self._text(),
        )

    def _config(self) -> ConsumerConfig:
        chance = self.chance
        return consumer_config(
            *self._consumer(),
            use_shm=chance.random() < 0.5,
            mode=chance.choice(list(Mode)),
            payload_fallback_uri=chance.choice((self._text(), "Z" * 600_000)),
            descriptor_channel=self._text(),
        )

    def _shutdown(self) -> Message:
        token = self.chance.choice(("", "sesam", "sesame ", "Z" * 40, self._text()))
        return ShmDriverShutdownRequest(
            correlation_id=1, reason=ShutdownReason.ADMIN, token=token, error_message=self._text()
        )

    def _announce(self) -> Message:
        """Of another driver; of the well-behaved client's stream an old one: a fresh one is a claim on it (K6)."""
        pools = dict.fromkeys(range(self.chance.choice((0, 1, 400))), 64)
        stream_id = self._stream_id()
        stamp_ns = 0 if stream_id == FRONT else self.clock.monotonic_ns()
        fields = {"epoch": self.chance.choice((0, 1, 2**63)), "announce_timestamp_ns": stamp_ns}
        return announce(stream_id, pools=pools, below="/" + self._text(), **fields)

    def _response(self) -> Message:
        """Of another driver, also to our own probe."""
        return ShmAttachResponse(
            correlation_id=self.chance.choice((self.probe_id, -1, -2)),  # others would be claims on their streams (K6)
            code=self.chance.choice(list(ResponseCode)),
            error_message=self._text(),
        )

    def _inquiry(self) -> Message:
        return DiscoveryRequest(
            request_id=0,
            client_id=self._client_id(),
            response_stream_id=self.chance.choice((0, 1000, U32)),
            stream_id=self.chance.choice((None, FRONT)),
            response_channel=self._text(),
            data_source_name=self._text(),
        )

    def end(self) -> None:
        """The right token: the notice is sent, and the driver ends within its shutdown timeout."""
        self.memory.waits = self.chance.random() < 0.5
        request = ShmDriverShutdownRequest(
            correlation_id=1, reason=ShutdownReason.ADMIN, token=TOKEN, error_message="\u20ac" * 2000
        )
        said = self.ask(request)
        config = self.conductor.lifecycle.config
        deadline_ns = self.clock.monotonic_ns() + config.shutdown_timeout_ns
        while not self.is_over:
            assert self.clock.monotonic_ns() <= deadline_ns
            self.hear(self.message())
            said = self.turn(100 * MS)
        assert isinstance(said[-1], ShmDriverShutdown)
        assert said[-1].reason is ShutdownReason.ADMIN
        assert self.conductor.lifecycle.counts["failures"] == 0


def _with_bytes(data: bytes, chance: random.Random) -> bytes:
    """The Zs of a text become bytes that are no text, of the same length."""
    found = re.search(rb"Z{4,}", data)
    if found is None:
        return data
    noise = chance.choice((b"\xff", "\u00e9".encode(), "\u20ac".encode(), b"\0", b"\n", b"\xed\xb3\xbf"))
    length = len(found[0])
    return data[: found.start()] + (noise * length)[:length] + data[found.end() :]


@contextmanager
def configured(overrides: dict[str, Any] | None = None) -> Iterator[DriverConfig]:
    """A few streams, leases and ids, so that they run out."""
    with private_directory() as folder:
        place = {"shm.base_dir": str(folder)}
        yield DriverConfig.load(environ={}, overrides=OVERRIDES | place | (overrides or {}))


def converse(config: DriverConfig, seed: int, steps: int = STEPS) -> int:
    """One conversation; how many messages the driver was sent."""
    conversation = Conversation(config, random.Random(seed))
    for number in range(steps):
        conversation.step()
        if number % 20 == 19:
            conversation.is_served()
    conversation.is_served()
    conversation.end()
    return conversation.messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_007)
    options = parser.parse_args()
    deadline_s, seed, messages = time.monotonic() + options.seconds, options.seed, 0
    logging.disable()
    with configured() as config:
        while time.monotonic() < deadline_s:
            try:
                messages += converse(config, seed)
            except BaseException:
                print(f"conversation {seed} failed: --seed {seed} repeats it", flush=True)
                raise
            seed += 1
    print(
        f"{seed - options.seed} conversations from seed {options.seed}, {messages} messages: nothing found", flush=True
    )


if __name__ == "__main__":
    main()
