# SPDX-License-Identifier: Apache-2.0
"""Soft state: entries that exist for as long as messages keep confirming them.

             add                 no refresh for stale_ns             not refreshed until gone_ns
    (none) ───────► fresh ──────────────────────────────► stale ─────────────────────────────────► (none)
                    ▲   │             retire                ▲ │      or the table is full
                    │   └───────────────────────────────────┘ │
                    └─────────────────────────────────────────┘
                                      refresh

Without a `gone_ns` an entry is removed when it becomes stale. Holds no clock and does no IO: callers pass `now_ns`, and
only `tick` moves entries along, so that its caller sees every transition. Wire §15.14; Discovery §6.2; decision E28.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec


class Ticked[K, V](msgspec.Struct, frozen=True):
    """The entries that became stale and those that were removed, each with its key, those unrefreshed longest first."""

    stale: list[tuple[K, V]]
    gone: list[tuple[K, V]]


class _Entry[V]:
    __slots__ = ("seen_ns", "value")

    def __init__(self, value: V, seen_ns: int) -> None:
        self.value = value
        self.seen_ns = seen_ns


class SoftStateTable[K, V]:
    """Entries by key, each with the time of its last refresh.

    >>> leases = SoftStateTable[int, str](stale_ns=3_000)
    >>> leases.add(17, "camera", now_ns=0)
    True
    >>> leases.refresh(17, now_ns=2_000)
    False
    >>> leases.tick(4_999).gone, leases.tick(5_000).gone
    ([], [(17, 'camera')])

    An entry is fresh until `stale_ns` after its last refresh. Refreshes are expected in the order of their times: an
    entry that is refreshed with an earlier time than another one may become stale only after that one.
    """

    def __init__(self, stale_ns: int, gone_ns: int | None = None, *, limit: int | None = None) -> None:
        self._stale_ns = stale_ns
        self._gone_ns = gone_ns
        self._limit = limit
        self._fresh: OrderedDict[K, _Entry[V]] = OrderedDict()  # those refreshed longest ago first
        self._stale: dict[K, _Entry[V]] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._stale)

    def __contains__(self, key: K) -> bool:
        return key in self._fresh or key in self._stale

    def __iter__(self) -> Iterator[K]:
        """The keys, those of fresh entries first."""
        yield from self._fresh
        yield from self._stale

    @property
    def is_full(self) -> bool:
        return self._limit is not None and len(self) >= self._limit

    def values(self) -> Iterator[V]:
        """The entries, fresh ones first."""
        for entries in (self._fresh, self._stale):
            for entry in entries.values():
                yield entry.value

    def get(self, key: K) -> V | None:
        """The entry, fresh or stale."""
        entry = self._fresh.get(key) or self._stale.get(key)
        return None if entry is None else entry.value

    def get_fresh(self, key: K, now_ns: int) -> V | None:
        """The entry, unless it is stale by now, whether or not a tick has noticed."""
        entry = self._fresh.get(key)
        return None if entry is None or now_ns - entry.seen_ns >= self._stale_ns else entry.value

    def add(self, key: K, value: V, now_ns: int) -> bool:
        """Put in a fresh entry, or replace the one that has this key; False where there is no room."""
        if key not in self:
            if self.is_full:
                return False
        else:
            self.pop(key)
        self._fresh[key] = _Entry(value, now_ns)
        return True

    def refresh(self, key: K, now_ns: int) -> bool:
        """The entry was confirmed; whether it was stale. An earlier time than its last one changes nothing."""
        entry = self._fresh.get(key)
        if entry is not None:
            entry.seen_ns = max(entry.seen_ns, now_ns)
            self._fresh.move_to_end(key)
            return False
        entry = self._stale.pop(key)
        entry.seen_ns = max(entry.seen_ns, now_ns)
        self._fresh[key] = entry
        return True

    def refresh_all(self, now_ns: int) -> None:
        """No message could be received for a while: that time counts against no entry."""
        for key in tuple(self):
            self.refresh(key, now_ns)

    def retire(self, key: K, now_ns: int) -> None:
        """The entry is known to be over: it is stale from now on, until `gone_ns` from now."""
        entry = self._fresh.pop(key, None) or self._stale.pop(key)
        entry.seen_ns = now_ns
        self._stale[key] = entry

    def pop(self, key: K) -> V | None:
        """Remove the entry, if there is one."""
        entry = self._fresh.pop(key, None) or self._stale.pop(key, None)
        return None if entry is None else entry.value

    def pop_oldest(self) -> tuple[K, V]:
        """Remove the fresh entry that was refreshed longest ago, to make room."""
        key, entry = self._fresh.popitem(last=False)
        return key, entry.value

    def clear(self) -> None:
        self._fresh.clear()
        self._stale.clear()

    def tick(self, now_ns: int) -> Ticked[K, V]:
        """Let time pass: fresh entries become stale, stale ones are removed, at once while the table is full."""
        stale: list[tuple[K, V]] = []
        gone: list[tuple[K, V]] = []
        was_full = self.is_full
        while self._fresh:
            key, entry = next(iter(self._fresh.items()))
            if now_ns - entry.seen_ns < self._stale_ns:
                break
            del self._fresh[key]
            if self._gone_ns is None:
                gone.append((key, entry.value))
            else:
                self._stale[key] = entry
                stale.append((key, entry.value))
        if self._gone_ns is not None:
            for key, entry in tuple(self._stale.items()):
                if was_full or now_ns - entry.seen_ns >= self._gone_ns:
                    del self._stale[key]
                    gone.append((key, entry.value))
        return Ticked(stale, gone)
