# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for what the driver makes of bytes: `fuzz_driver.py [libFuzzer options] [corpus]`.

An input is a conversation: records of a step in time and a message. Whatever is said, the driver's decisions raise
nothing, every answer can be encoded, none is much longer than what prompted it, and the tables stay consistent: one
producer per stream, as many leases as there may be, every grant and every end sent once.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import atheris
from fuzz_wire import instrument  # type: ignore[import-not-found]  # run as a script: its folder is on the path

from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import Announce, CreateEpoch, Effect, Send
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.lifecycle import Lifecycle, Phase
from tensorpool.errors import DecodeError
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ConsumerConfig, ConsumerHello
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
)

FIRST_LEASE_ID = 500
MAX_LEASES = 6
ANSWER_BYTES = 4096  # a grant, a text, a few URIs
STEP_NS = 50_000_000

_RECORD = struct.Struct("<BBH")  # steps in time, what becomes of the next epoch, length of the message

CONFIG = DriverConfig.load(
    environ={},
    overrides={
        "driver.stream_id_range": [20_000, 20_002],
        "driver.descriptor_stream_id_range": [31_000, 31_001],
        "driver.control_stream_id_range": [32_000, 32_000],
        "policies.allow_dynamic_streams": True,
        "policies.max_leases": MAX_LEASES,
        "policies.shutdown_token": "sesame",
        "profiles.default": {"header_nslots": 4, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]},
        "streams.front.stream_id": 10_000,
        "streams.rear.stream_id": 10_001,
    },
)


class Conversation:
    """A driver without memory or transport, and the records that a listener would keep of it."""

    def __init__(self) -> None:
        self._now_ns = 1
        self._epoch = 0
        self._granted: set[int] = set()
        self._ended: set[int] = set()
        self._lifecycle = Lifecycle(CONFIG, first_lease_id=FIRST_LEASE_ID)
        self._perform(self._lifecycle.on_start(self._now_ns), fails=False, room=0)

    def hear(self, steps: int, fails: bool, data: bytes) -> None:
        self._now_ns += steps * STEP_NS
        self._perform(self._lifecycle.on_tick(self._now_ns), fails, room=0)
        self._perform(self._decide(data), fails, room=len(data))
        self._check()

    @property
    def is_over(self) -> bool:
        return self._lifecycle.phase is Phase.ENDED

    def _decide(self, data: bytes) -> list[Effect]:
        lifecycle, now_ns = self._lifecycle, self._now_ns
        try:
            message = decode(data)
        except DecodeError as error:
            return [
                *lifecycle.on_malformed_attach(-1, ResponseCode.INVALID_PARAMS, str(error)),
                *lifecycle.on_malformed_detach(-1, ResponseCode.UNSUPPORTED, str(error)),
            ]
        match message:
            case ShmLeaseKeepalive():
                lifecycle.on_keepalive(message, now_ns)
            case ShmAttachRequest() | ExtendedAttachRequest():
                return lifecycle.on_attach(message, now_ns)
            case ShmDetachRequest():
                return lifecycle.on_detach(message, now_ns)
            case ShmDriverShutdownRequest():
                return lifecycle.on_shutdown_request(message, now_ns)
            case ConsumerHello():
                return lifecycle.on_consumer_hello(message, now_ns)
            case ConsumerConfig():
                lifecycle.on_consumer_config(message)
        return []

    def _perform(self, effects: list[Effect], fails: bool, room: int) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._say(effect.message, room)
                case Announce():
                    announce = self._lifecycle.announce(effect.stream_id, self._now_ns)
                    if announce is not None:
                        self._say(announce, room)
                case CreateEpoch() if fails:
                    text = "no space \u2026" * 200
                    outcome = self._lifecycle.on_epoch_failed(effect.stream_id, effect.reserve, text, self._now_ns)
                    self._perform(outcome, False, room)
                case CreateEpoch():
                    self._epoch += 1
                    uri = f"shm:file?path=/dev/shm/{effect.stream_id}/{self._epoch}/header.ring"
                    epoch = Epoch(effect.stream_id, self._epoch, 1, effect.ring, uri, (uri,) * len(effect.ring.pools))
                    outcome = self._lifecycle.on_epoch_created(epoch, effect.reserve, self._now_ns)
                    self._perform(outcome, fails, room)

    def _say(self, message: Message, room: int) -> None:
        data = message.encode()
        assert decode(data) == message
        assert len(data) <= room + ANSWER_BYTES, type(message)
        match message:
            case ShmAttachResponse(code=ResponseCode.OK) | ExtendedAttachResponse(code=ResponseCode.OK):
                assert message.lease_id is not None
                self._granted.add(message.lease_id)
                assert message.lease_id not in self._ended
            case ShmLeaseRevoked():
                assert message.lease_id in self._granted
                assert message.lease_id not in self._ended
                self._ended.add(message.lease_id)

    def _check(self) -> None:
        leases = list(self._lifecycle.leases)
        assert {lease.lease_id for lease in leases} == self._granted - self._ended
        assert len(leases) <= MAX_LEASES
        assert len({lease.client_id for lease in leases}) == len(leases)
        node_ids = [self._lifecycle.node_ids.of(lease.client_id) for lease in leases]
        held = [node_id for node_id in node_ids if node_id is not None]
        assert len(set(held)) == len(held) <= len(self._lifecycle.node_ids)
        assert len(self._lifecycle.node_ids) <= len(leases) + len(self._lifecycle._pending)
        producers = [lease.stream_id for lease in leases if lease.role is Role.PRODUCER]
        assert len(producers) == len(set(producers))
        for stream in self._lifecycle.streams:
            assert (stream.producer is not None) == (stream.stream_id in producers)


def records(data: bytes) -> Iterator[tuple[int, bool, bytes]]:
    at = 0
    while at + _RECORD.size <= len(data):
        steps, fails, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        yield steps, bool(fails & 1), data[at : at + length]
        at += length


def record(message: bytes, *, steps: int = 0, fails: bool = False) -> bytes:
    """How the corpus was written."""
    return _RECORD.pack(steps, fails, len(message)) + message


def converse(data: bytes) -> None:
    conversation = Conversation()
    for steps, fails, message in records(data):
        if conversation.is_over:
            return
        conversation.hear(steps, fails, message)


def main(arguments: list[str]) -> None:
    for package in ("tensorpool.wire", "tensorpool.driver.leases", "tensorpool.driver.streams"):
        instrument(package)
    instrument("tensorpool.driver.lifecycle")
    atheris.Setup(arguments, converse)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
