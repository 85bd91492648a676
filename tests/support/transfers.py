# SPDX-License-Identifier: Apache-2.0
"""Messages from one media driver to others over UDP, each compared byte by byte with what was sent.

    transfer(source, [target], channel)      until `total_bytes` have arrived, or for `seconds`

Sizes are what a bridge and a busy control stream make: mostly full datagrams, some short, some fragmented over many.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from tensorpool import aeron

STREAM_ID: Final = 4_711
PATTERN: Final = random.Random(7).randbytes(1 << 18)
PATIENCE_S: Final = 60.0


def free_ports(count: int, *, address: str = "127.0.0.1") -> list[int]:
    """Ports of UDP that no socket has now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def message(number: int, mtu: int) -> bytes:
    """The same for the same number, in every process."""
    chance = random.Random(number)
    longest = mtu - 32
    length = chance.choice((longest, longest, longest, 1 + chance.randrange(longest), 1 + chance.randrange(100_000)))
    start = chance.randrange(len(PATTERN) - 100_000)
    return number.to_bytes(8, "little") + PATTERN[start : start + max(length - 8, 0)]


class Arrivals:
    """What one subscriber has received so far, all of it checked."""

    def __init__(self, subscription: aeron.Subscription, mtu: int) -> None:
        self.count = self.bytes = 0
        self.reserved_values: list[int] = []
        self._subscription = subscription
        self._mtu = mtu

    def poll(self) -> int:
        return self._subscription.poll(self._check, 256)

    def _check(self, data: bytes, info: aeron.MessageInfo) -> None:
        assert data == message(self.count, self._mtu), f"message {self.count} of {len(data)} bytes is not what was sent"
        self.reserved_values.append(info.reserved_value)
        self.count += 1
        self.bytes += len(data)


def transfer(
    source: str,
    targets: Sequence[str],
    sending: str,
    receiving: Sequence[str],
    *,
    mtu: int = 1408,
    total_bytes: int = 4 << 20,
    seconds: float = 0.0,
    meanwhile: Callable[[float], None] = lambda _: None,
) -> list[Arrivals]:
    """Send from the media driver at `source` to a subscriber at each of `targets`, and return what arrived there.

    `meanwhile` is called about every tenth of a second with the seconds since the start.
    """
    with contextlib.ExitStack() as stack:
        clients = [aeron.connect(directory) for directory in (source, *targets)]
        for client in clients:
            stack.callback(client.close)
        arrivals = [
            Arrivals(client.add_subscription(channel, STREAM_ID), mtu)
            for client, channel in zip(clients[1:], receiving, strict=True)
        ]
        publication = clients[0].add_publication(f"{sending}|mtu={mtu}", STREAM_ID, exclusive=True)
        number = sent_bytes = 0
        began_s = moved_s = looked_s = time.monotonic()
        while (
            min(arrival.count for arrival in arrivals) < number
            or number == 0
            or sent_bytes < total_bytes
            or (time.monotonic() - began_s < seconds)
        ):
            now_s = time.monotonic()
            moved = 0
            if sent_bytes < total_bytes or now_s - began_s < seconds:
                data = message(number, mtu)
                while publication.offer(data):
                    moved += 1
                    number, sent_bytes = number + 1, sent_bytes + len(data)
                    if moved == 32:
                        break
                    data = message(number, mtu)
            moved += sum(arrival.poll() for arrival in arrivals)
            if now_s - looked_s > 0.1:
                looked_s = now_s
                meanwhile(now_s - began_s)
            if moved:
                moved_s = now_s
            else:
                counts = [arrival.count for arrival in arrivals]
                assert now_s - moved_s < PATIENCE_S, f"stands still: {number} messages sent, {counts} arrived"
                time.sleep(0.0002)
        return arrivals
