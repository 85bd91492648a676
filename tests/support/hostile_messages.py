# SPDX-License-Identifier: Apache-2.0
"""Messages that no well-behaved client sends, and files of them for `Nursery.flood`."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tensorpool.wire.driver import HugepagesPolicy, Role, ShmDriverShutdownRequest, ShutdownReason
from tests.support import driver_client
from tests.support.driver_client import Lease, attach_request
from tests.support.messages import hello
from tests.support.processes import ROOT

CORPUS: Final = ROOT / "tests" / "fuzz" / "corpus"


def hostile_messages(seed: int, count: int, leases: list[Lease], max_length: int) -> list[bytes]:
    """Messages none of which gives its sender a lease, or may touch those of others.

    Noise, messages of all schemas with bytes changed, cut or added, groups and texts of absurd length, messages as long
    as the log takes them, and requests that are well-formed but name what is not their sender's.
    """
    chance = random.Random(seed)
    samples = [path.read_bytes() for path in sorted(CORPUS.glob("*/*")) if path.parent.name != "driver_control"]
    makers = {
        _noise: 10,
        _mutant: 50,
        _absurd: 10,
        _foreign_lease: 15,
        _refusable_attach: 8,
        _greedy_hello: 6,
        _wrong_token: 1,
    }
    chosen = chance.choices(list(makers), list(makers.values()), k=count)
    messages = [maker(chance, samples, leases) for maker in chosen]
    giants = [_giant(chance, samples, length) for length in (max_length, max_length - 1, max_length // 3)]
    return messages + giants


def _noise(chance: random.Random, samples: list[bytes], _: list[Lease]) -> bytes:
    """Nothing at all, behind a good header or not."""
    noise = chance.randbytes(chance.choice((0, 1, 7, 8, 9, 15, 16, 24, 33, 200, 1400, 3000)))
    return noise if chance.random() < 0.5 else chance.choice(samples)[:8] + noise


def _mutant(chance: random.Random, samples: list[bytes], leases: list[Lease]) -> bytes:
    """A message of any schema, damaged."""
    data = bytearray(chance.choice(samples))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f")
                )
            case 2:
                del data[at:]
            case 3:
                data += chance.randbytes(chance.randint(1, 40))
            case _:
                data[at:at] = data[:at]
    return bytes(data)


def _absurd(chance: random.Random, samples: list[bytes], _: list[Lease]) -> bytes:
    """A group of 65534 entries, or a text of four gigabytes, in a message that has nothing of the kind."""
    claims = (
        struct.pack("<HH", chance.choice((0, 10, 65535)), 65534),
        struct.pack("<I", chance.choice((2**32 - 1, 2**30))),
    )
    return chance.choice(samples) + chance.choice(claims) * chance.randint(1, 30)


def _foreign_lease(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """A keepalive or detach that is right but for one field: of another client's lease."""
    lease = chance.choice(leases)
    wrong: dict[str, Any] = chance.choice(
        [
            {"lease_id": lease.lease_id + chance.choice((-1, 1)) * chance.randint(10**6, 10**12)},
            {"client_id": lease.client_id ^ 1 << chance.randrange(31)},
            {"stream_id": lease.stream_id ^ 1 << chance.randrange(31)},
            {"role": Role.PRODUCER if lease.role is Role.CONSUMER else Role.CONSUMER},
        ]
    )
    return (lease.keepalive if chance.random() < 0.5 else lease.detach)(**wrong).encode()


def _refusable_attach(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """For a missing stream, with client id 0, by a client that has a lease, or in a later version."""
    lease = chance.choice(leases)
    wrong: dict[str, Any] = chance.choice(
        [
            {"stream_id": chance.choice((0, 1, 2**31, 2**32 - 2))},
            {"client_id": 0},
            {"client_id": lease.client_id},
            {"expected_layout_version": 7},
            {"require_hugepages": HugepagesPolicy.HUGEPAGES},
        ]
    )
    stream_id = wrong.pop("stream_id", lease.stream_id)
    data = bytearray(attach_request(stream_id, chance.choice(list(Role)), **wrong).encode())
    data[6] = chance.choice((1, 1, 0, 2, 255))
    return bytes(data)


def _greedy_hello(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """One of many consumers that ask for streams of their own, on channels that cannot be opened."""
    channel = chance.choice(("aeron:ipc", "aeron:\udcff\udc80", "\0" * 10, "x" * 5000, "aeron:ipc|" * 300))
    asked = hello(chance.choice(leases).stream_id, chance.randrange(1, 5000))
    fields = struct.pack("<I", len(channel)) + channel.encode("utf-8", "surrogateescape")
    return asked.encode()[:-8] + fields * 2


def _wrong_token(chance: random.Random, _: list[bytes], __: list[Lease]) -> bytes:
    token = chance.choice(("", "x", "\0", "open sesam", "open sesame ", "x" * 100_000))
    return driver_client.shutdown_request(token).encode()


def _giant(chance: random.Random, samples: list[bytes], length: int) -> bytes:
    """A text as long as the log takes it, in a request that has texts."""
    head = ShmDriverShutdownRequest(correlation_id=1, reason=ShutdownReason.ADMIN, token="", error_message="").encode()[
        :-8
    ]
    room = length - len(head) - 8
    return head + struct.pack("<I", room) + chance.randbytes(room) + bytes(4)


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    path.write_bytes(b"".join(len(message).to_bytes(4, "little") + message for message in messages))


def read_messages(path: Path) -> list[bytes]:
    data, messages, at = path.read_bytes(), [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        messages.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return messages
