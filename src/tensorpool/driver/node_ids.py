# SPDX-License-Identifier: Apache-2.0
"""Node ids: which client makes which trace ids.

    free ──take──► held by a client ──give_back──► cooling ──cool-down over──► free

Each client that asks in the dialect "2026-01" gets an id that no other live client has, the one that it wishes for if
that is free. An id that comes back rests, so that trace ids of its next client differ from those of the last one. Where
none is free a client gets none, and derives one by itself. Holds no clock and does no IO. Decision K9.
"""

from __future__ import annotations

from collections import deque

from tensorpool.settings import Range


class NodeIds:
    """The node ids of live clients. The first one that is given away is the `start`-th of `ids`, counted round."""

    def __init__(self, ids: Range, cooldown_ns: int, start: int = 0) -> None:
        self._held: dict[int, int] = {}  # by client
        self._holders: dict[int, int] = {}  # the client, by node id
        self._cooling: dict[int, int] = {}  # until when, by node id
        self._ends: deque[tuple[int, int]] = deque()  # the same, soonest first
        self._start = start
        self.configure(ids, cooldown_ns)

    def configure(self, ids: Range, cooldown_ns: int) -> None:
        """Give away ids of another range from now on; what is held stays so."""
        self._ids = ids
        self._cooldown_ns = cooldown_ns
        self._next = ids.first + self._start % len(ids) if ids else 0

    def __len__(self) -> int:
        return len(self._held)

    def of(self, client_id: int) -> int | None:
        """What this client has."""
        return self._held.get(client_id)

    def flaw_in_wish(self, wish: int | None, now_ns: int) -> str | None:
        """Why a client cannot have the id that it wishes for; None where it can, or wishes for none (None or 0)."""
        self._end_cooling(now_ns)
        if wish in self._holders:
            return f"node id {wish} belongs to client {self._holders[wish]}; ask for another, or for any"
        if wish in self._cooling:
            left_ms = -(-(self._cooling[wish] - now_ns) // 1_000_000)
            return f"node id {wish} was given back and is free in {left_ms} ms; ask for another, or for any"
        return None

    def take(self, client_id: int, wish: int | None, now_ns: int) -> int | None:
        """An id for a client that has none: its wish, of the range or not, or the next free one; None where none is.

        Raises ValueError for a client that has one, and for a wish with a flaw.
        """
        if client_id in self._held or self.flaw_in_wish(wish, now_ns) is not None:
            raise ValueError(f"client {client_id} has a node id, or cannot have {wish}")
        node_id = wish or self._next_free()
        if node_id is not None:
            self._held[client_id] = node_id
            self._holders[node_id] = client_id
        return node_id

    def give_back(self, client_id: int, now_ns: int) -> None:
        """The client is gone; nothing happens where it has none."""
        node_id = self._held.pop(client_id, None)
        if node_id is None:
            return
        del self._holders[node_id]
        if self._cooldown_ns:
            self._cooling[node_id] = now_ns + self._cooldown_ns
            self._ends.append((now_ns + self._cooldown_ns, node_id))

    def _next_free(self) -> int | None:
        for _ in range(len(self._ids)):
            node_id = self._next
            self._next = self._ids.first if node_id >= self._ids.last else node_id + 1
            if node_id not in self._holders and node_id not in self._cooling:
                return node_id
        return None

    def _end_cooling(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            end_ns, node_id = self._ends.popleft()
            if self._cooling.get(node_id) == end_ns:
                del self._cooling[node_id]
