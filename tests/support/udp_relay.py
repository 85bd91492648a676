# SPDX-License-Identifier: Apache-2.0
"""A bad stretch of network: forwards real datagrams between two hosts, some of them twice, some of them late.

    python -m tests.support.udp_relay LISTEN_ADDRESS TARGET_ADDRESS PORT...

What is sent to a port of LISTEN_ADDRESS reaches the same port of TARGET_ADDRESS; answers go back to whom they belong,
as through a router that translates addresses. Lines on its input are JSON and answered by one of counters:
{"duplicate": 0.05, "reorder": 0.1}. A late datagram is overtaken by those of the next `LATE_S`. `messages` are the
schema and template ids of everything that went to the target.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from typing import Any, Final

LATE_S: Final = 0.002
BUFFER_BYTES: Final = 8 << 20
BATCH: Final = 64  # datagrams of a socket before the others have their turn
FRAME: Final = struct.Struct("<iBBH24x HHHH")  # Aeron's data frame, and the SBE header of the message in it
DATA, BEGIN = 1, 0x80


class Relay:
    """One per direction and port: datagrams, the queue of late ones, and where they go."""

    def __init__(self, listen: str, target: str, ports: list[int]) -> None:
        self.rates = {"duplicate": 0.0, "reorder": 0.0}
        self.counts = {"forwarded": 0, "duplicate": 0, "reorder": 0, "refused": 0}
        self.messages: set[tuple[int, int]] = set()  # schema and template
        self._target = target
        self._chance = random.Random(4711)
        self._selector = selectors.DefaultSelector()
        self._ways: dict[tuple[int, Any], socket.socket] = {}  # port and client: the socket that speaks for it
        self._late: list[tuple[float, int, socket.socket, bytes, Any]] = []
        self._numbers = itertools.count()
        self._orders = b""
        for port in ports:
            front = _socket(listen, port)
            self._selector.register(front, selectors.EVENT_READ, ("front", port, None))
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until the end of the input."""
        while True:
            wait_s = max(self._late[0][0] - time.monotonic(), 0.0) if self._late else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    if not self._obey():
                        return
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._forward(key.fileobj, *key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, out, data, to = heapq.heappop(self._late)
                self._send(out, data, to)

    def _forward(self, arrived: socket.socket, side: str, port: int, client: Any) -> None:
        for _ in range(BATCH):
            try:
                data, sender = arrived.recvfrom(65_536)
            except (BlockingIOError, ConnectionRefusedError):
                return
            if side == "front":
                self._look_at(data)
                self._pass_on(self._way(arrived, port, sender), data, (self._target, port))
            else:
                self._pass_on(client[0], data, client[1])

    def _look_at(self, data: bytes) -> None:
        at = 0
        while at + FRAME.size <= len(data):
            length, _, flags, kind, _, template_id, schema_id, _ = FRAME.unpack_from(data, at)
            if length <= 0:
                return  # a heartbeat
            if kind == DATA and flags & BEGIN:
                self.messages.add((schema_id, template_id))
            at += -(-length // 32) * 32

    def _way(self, front: socket.socket, port: int, client: Any) -> socket.socket:
        way = self._ways.get((port, client))
        if way is None:
            way = self._ways[port, client] = _socket("0.0.0.0", 0)
            self._selector.register(way, selectors.EVENT_READ, ("back", port, (front, client)))
        return way

    def _pass_on(self, out: socket.socket, data: bytes, to: Any) -> None:
        self.counts["forwarded"] += 1
        chance = self._chance.random
        if chance() < self.rates["duplicate"]:
            self.counts["duplicate"] += 1
            self._send(out, data, to)
        if chance() < self.rates["reorder"]:
            self.counts["reorder"] += 1
            heapq.heappush(self._late, (time.monotonic() + chance() * LATE_S, next(self._numbers), out, data, to))
        else:
            self._send(out, data, to)

    def _send(self, out: socket.socket, data: bytes, to: Any) -> None:
        try:
            out.sendto(data, to)
        except (BlockingIOError, ConnectionRefusedError):
            self.counts["refused"] += 1

    def _obey(self) -> bool:
        data = os.read(sys.stdin.fileno(), 65_536)
        self._orders += data
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            self.rates |= json.loads(line)
            print(json.dumps({**self.counts, "messages": sorted(self.messages)}), flush=True)
        return bool(data)


def _socket(address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in ("SO_RCVBUFFORCE", "SO_SNDBUFFORCE"):
        number = {"SO_RCVBUFFORCE": 33, "SO_SNDBUFFORCE": 32}[option]
        made.setsockopt(socket.SOL_SOCKET, number, BUFFER_BYTES)
    made.bind((address, port))
    made.setblocking(False)
    return made


if __name__ == "__main__":
    relay = Relay(sys.argv[1], sys.argv[2], list(map(int, sys.argv[3:])))
    print("relays", flush=True)
    relay.run()
