# SPDX-License-Identifier: Apache-2.0
"""Two processes that misbehave on a driver's control stream, for benchmarks.scenario.

    python -m benchmarks.scenario_guests hostile CONFIG AERON_DIR SEED
    python -m benchmarks.scenario_guests mute CONFIG AERON_DIR

`hostile` sends damaged and extreme messages, keepalives and detaches that name other clients' leases with one field
wrong, conversations of hellos and configurations with huge texts, and discovery queries. `mute` subscribes to the
control stream as any Aeron program may, tethered, and never polls. Both print "ready" and end with their input.
"""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Final

from tensorpool import aeron
from tensorpool.channel import Endpoint
from tensorpool.driver import DriverConfig
from tensorpool.wire import DecodeError, Message, decode
from tensorpool.wire.driver import ResponseCode, ShmAttachRequest, ShmAttachResponse, ShmDriverShutdown
from tests.support.disc_client import Counted, raw_request
from tests.support.driver_client import Lease
from tests.support.hostile_messages import hostile_messages
from tests.support.listener import ReceivedMessage
from tests.support.messages import consumer_config, hello

MESSAGES_PER_S: Final = 200
QUERIES_PER_S: Final = 10
BATCH: Final = 2000
KNOWN_LEASES: Final = 64
GIANT_BYTES: Final = 4 * 2**20 // 8  # as long as a message can be in a term of 4 MiB
# Template and schema of a header: a forged notice of the driver's end looks like a real one.
_SHUTDOWN_KEY: Final = struct.pack("<2H", ShmDriverShutdown.TEMPLATE_ID, ShmDriverShutdown.SCHEMA_ID)
RESPONSES: Final = ("aeron:ipc?term-length=1m", 1499)


class Eavesdropper:
    """Learns leases from the requests and answers that every subscriber of the control stream receives."""

    def __init__(self, streams: Collection[int]) -> None:
        self.leases: list[Lease] = []
        self._streams = streams
        self._asked: dict[int, ShmAttachRequest] = {}

    def on_message(self, data: bytes, _: aeron.MessageInfo) -> None:
        with contextlib.suppress(DecodeError):
            message = decode(data)
            if isinstance(message, ShmAttachRequest):
                self._asked[message.correlation_id] = message
                if len(self._asked) > 10 * KNOWN_LEASES:
                    self._asked.pop(next(iter(self._asked)))
            elif isinstance(message, ShmAttachResponse) and message.code is ResponseCode.OK:
                self._note(message, data)

    def _note(self, answer: ShmAttachResponse, data: bytes) -> None:
        asked = self._asked.pop(answer.correlation_id, None)
        if asked is not None and answer.stream_id in self._streams:  # and not one of our own inventions
            received = ReceivedMessage(answer, data, 0, 0, 0)
            self.leases = [*self.leases[1 - KNOWN_LEASES :], Lease(asked.client_id, asked.role, answer, 0, received)]


def batch(chance: random.Random, leases: list[Lease]) -> Iterator[bytes]:
    """What a hostile client sends next, in an order of its own."""
    said = hostile_messages(chance.getrandbits(32), BATCH, leases, GIANT_BYTES)
    said = [data for data in said if data[2:6] != _SHUTDOWN_KEY]
    chance.shuffle(said)
    for data in said:
        yield data
        if chance.random() < 0.02:
            for message in conversation(chance, chance.choice(leases).stream_id):
                yield message if isinstance(message, bytes) else message.encode()


def conversation(chance: random.Random, stream_id: int) -> list[Message | bytes]:
    """A hello, a configuration of that consumer with an extreme text, and the hello again."""
    consumer_id = 2**31 + chance.randrange(2**20)  # of no real consumer
    asked = hello(
        stream_id,
        consumer_id,
        descriptor_stream_id=chance.choice((0, 1, 50_000, 2**32 - 2)),
        control_stream_id=chance.choice((0, 1, 60_000, 2**32 - 2)),
        descriptor_channel=chance.choice(("", "aeron:ipc", "x" * 5000)),
        max_rate_hz=chance.choice((0, 1, 2**16 - 2)),
    )
    uri = chance.choice(("", "aeron:udp?endpoint=127.0.0.1:1", "x" * 65_000, "x" * (GIANT_BYTES - 1000)))
    config = consumer_config(stream_id, consumer_id, use_shm=chance.random() < 0.5, payload_fallback_uri=uri)
    data = bytearray(config.encode())
    if chance.random() < 0.3 and uri:
        data[-12:-8] = b"\xff\xfe\xc3\x28"  # no text in any encoding that a URI may have
    return [asked, bytes(data), asked]


def query(chance: random.Random, number: int) -> bytes:
    """A discovery request: mostly without a filter, sometimes damaged or with an absurd group of tags."""
    channel, stream_id = RESPONSES
    tags = Counted(0, chance.choice((0, 0, 0, 65_534)))
    data = raw_request(number, client_id=7, response_stream_id=stream_id, response_channel=channel.encode(), tags=tags)
    return data if chance.random() < 0.8 else data[: chance.randrange(len(data))]


def attack(config: DriverConfig, aeron_dir: str, seed: int, is_over: threading.Event) -> None:
    chance = random.Random(seed)
    spy = Eavesdropper({stream.stream_id for stream in config.streams.values()})
    with contextlib.closing(aeron.connect(aeron_dir)) as client:
        control = client.add_subscription(*_words(config.driver.control))
        answers = client.add_subscription(*RESPONSES)
        publication = client.add_publication(*_words(config.driver.control), True)
        questions = client.add_publication(*_words(config.discovery.endpoint), True)
        print("ready", flush=True)
        number = dropped = 0
        messages: Iterator[bytes] = iter(())
        while not is_over.wait(1 / MESSAGES_PER_S):
            control.poll(spy.on_message, 1000)
            answers.poll(lambda data, info: None, 1000)
            if not spy.leases:
                continue
            number += 1
            message = next(messages, None)
            if message is None:
                messages = batch(chance, spy.leases)
                message = next(messages)
            dropped += not publication.offer(message)  # without waiting: the log may be held by `mute`
            if number % (MESSAGES_PER_S // QUERIES_PER_S) == 0:
                questions.offer(query(chance, number))
        print(f"{number} messages, {dropped} of them not taken by the log", flush=True)


def subscribe(config: DriverConfig, aeron_dir: str, is_over: threading.Event) -> None:
    with contextlib.closing(aeron.connect(aeron_dir)) as client:
        subscription = client.add_subscription(*_words(config.driver.control))
        while not subscription.image_count:
            time.sleep(0.01)
        print("ready", flush=True)
        is_over.wait()


def _words(endpoint: Endpoint) -> tuple[str, int]:
    return endpoint.channel, endpoint.stream_id


def _wait_for_end(is_over: threading.Event) -> None:
    sys.stdin.read()
    is_over.set()


def main(kind: str, config_path: str, aeron_dir: str, seed: str = "1") -> None:
    is_over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(is_over,), daemon=True).start()
    config = DriverConfig.load(config_path)
    if kind == "mute":
        subscribe(config, aeron_dir, is_over)
    else:
        attack(config, aeron_dir, int(seed), is_over)


if __name__ == "__main__":
    main(*sys.argv[1:])
