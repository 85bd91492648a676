# SPDX-License-Identifier: Apache-2.0
"""Leases: who may read or write a stream, and until when.

    grant ──► ATTACHED ──keepalive──► ACTIVE ──keepalive──► ACTIVE
                  │                      │
                  ├──detach──► DETACHED  │
                  ├──expire──► EXPIRED   │   (the same three ends from ACTIVE)
                  └──revoke──► REVOKED   │

Holds no clock and does no IO: callers pass `now_ns` and act on what is returned. A lease that ended is forgotten; its
id never comes back. A lease knows the process that holds it where the client declared it (E47).
Driver Model §4.1, §4.4, §4.7, §4.8, §4.9; decisions E1, E2, E5, E6, E10, E11, E47.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from enum import Enum, auto

import msgspec

from tensorpool.driver.clients import Owner
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire.attach import AttachRequest
from tensorpool.wire.driver import (
    Role,
    ShmDetachRequest,
    ShmLeaseKeepalive,
)


class LeaseState(Enum):
    """Where a lease is in its life (§4.7)."""

    ATTACHED = auto()
    ACTIVE = auto()
    DETACHED = auto()
    EXPIRED = auto()
    REVOKED = auto()


class Keepalive(Enum):
    """What a keepalive did. Only EXTENDED changes anything."""

    EXTENDED = auto()
    UNKNOWN_LEASE = auto()
    WRONG_FIELDS = auto()


class Lease(msgspec.Struct):
    """One client's right to one stream in one role."""

    lease_id: int
    stream_id: int
    client_id: int
    role: Role
    granted_ns: int
    expiry_ns: int
    request: AttachRequest  # for an identical retry (E2)
    state: LeaseState = LeaseState.ATTACHED
    is_owed_answer: bool = False  # to such a retry, once its stream has an epoch again
    is_forgiven: bool = False  # since its last keepalive
    granted_utc_ns: int = 0
    kept_ns: int = 0  # when its last keepalive came, or it was granted
    owner: Owner | None = None  # the process that holds it, as far as that is known

    def __str__(self) -> str:
        return f"{self.role.name.lower()} client {self.client_id} ({self.holder})"

    @property
    def process(self) -> ProcessIdentity | None:
        return None if self.owner is None else self.owner.process

    @property
    def user(self) -> str | None:
        """The account that holds it; None: its client has not declared itself."""
        return None if self.owner is None else self.owner.user

    @property
    def holder(self) -> str:
        """The lease, what is known of the process that holds it, and since when by the clock on the wall."""
        since = f"{datetime.fromtimestamp(self.granted_utc_ns / 1e9):%H:%M}" if self.granted_utc_ns else ""
        known = [f"lease {self.lease_id}", "" if self.owner is None else str(self.owner), since and f"since {since}"]
        return ", ".join(filter(None, known))


class LeaseTable:
    """Every lease that is alive. Ids grow from `first_lease_id`, which differs between runs of the driver (E6)."""

    def __init__(self, duration_ns: int, first_lease_id: int) -> None:
        self._duration_ns = duration_ns
        self._next_lease_id = first_lease_id
        self._leases: dict[int, Lease] = {}
        self._by_client: dict[int, Lease] = {}
        self.no_expiry_before_ns = 0  # no lease can expire earlier; callers may skip `expire` until then

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def of_client(self, client_id: int) -> Lease | None:
        """The one lease that `client_id` may hold (§4.8)."""
        return self._by_client.get(client_id)

    def grant(self, stream_id: int, request: AttachRequest, now_ns: int) -> Lease:
        """A new lease on `stream_id`, which may be other than the requested one (id 0 asks for any).

        The caller has made sure that the client holds none and that the stream has room.
        """
        client_id = request.client_id
        if client_id in self._by_client:
            raise ValueError(f"client {client_id} already holds lease {self._by_client[client_id].lease_id}")
        lease = Lease(
            lease_id=self._next_lease_id,
            stream_id=stream_id,
            client_id=client_id,
            role=request.role,
            granted_ns=now_ns,
            expiry_ns=now_ns + self._duration_ns,
            request=request,
            kept_ns=now_ns,
        )
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        self._by_client[client_id] = lease
        self.no_expiry_before_ns = min(self.no_expiry_before_ns, lease.expiry_ns)
        return lease

    def keepalive(self, message: ShmLeaseKeepalive, now_ns: int) -> Keepalive:
        """Extend the lease if every field of the message is the lease's own (E5)."""
        lease = self._leases.get(message.lease_id)
        if lease is None:
            return Keepalive.UNKNOWN_LEASE
        if not self._names(lease, message):
            return Keepalive.WRONG_FIELDS
        lease.state = LeaseState.ACTIVE
        lease.kept_ns = now_ns
        lease.is_forgiven = False
        lease.expiry_ns = max(lease.expiry_ns, now_ns + self._duration_ns)
        return Keepalive.EXTENDED

    def detach(self, message: ShmDetachRequest) -> Lease | None:
        """End the lease that the message names in every field; None leaves everything as it is (E10, E11)."""
        lease = self._leases.get(message.lease_id)
        if lease is None or not self._names(lease, message):
            return None
        return self._end(lease, LeaseState.DETACHED)

    def revoke(self, lease_id: int) -> Lease | None:
        """End a lease for administrative or safety reasons."""
        lease = self._leases.get(lease_id)
        return self._end(lease, LeaseState.REVOKED) if lease else None

    def expire(self, now_ns: int) -> list[Lease]:
        """End and return every lease whose time is up. Costs nothing before the first one can be."""
        if now_ns < self.no_expiry_before_ns:
            return []
        expired = [lease for lease in self._leases.values() if now_ns >= lease.expiry_ns]
        for lease in expired:
            self._end(lease, LeaseState.EXPIRED)
        self.no_expiry_before_ns = min(
            (lease.expiry_ns for lease in self._leases.values()), default=now_ns + self._duration_ns
        )
        return expired

    def forgive(self, now_ns: int) -> None:
        """The driver itself was stalled: no client loses a lease for keepalives that it could not read.

        Once between two keepalives: a silent lease ends, however often the driver stalls.
        """
        for lease in self._leases.values():
            if not lease.is_forgiven:
                lease.is_forgiven = True
                lease.expiry_ns = max(lease.expiry_ns, now_ns + self._duration_ns)

    @staticmethod
    def _names(lease: Lease, message: ShmLeaseKeepalive | ShmDetachRequest) -> bool:
        return (lease.stream_id, lease.client_id, lease.role) == (
            message.stream_id,
            message.client_id,
            message.role,
        )

    def _end(self, lease: Lease, state: LeaseState) -> Lease:
        lease.state = state
        del self._leases[lease.lease_id]
        del self._by_client[lease.client_id]
        return lease


def holders(leases: Iterable[Lease], most: int = 8) -> str:
    """How many of these leases each account holds, with the processes; those that hold most come first.

    >>> holders(table)                                                  # doctest: +SKIP
    'user lab 3 (pids 8812, 9001), not declared 2'
    """
    by_user: dict[str | None, list[Lease]] = {}
    for lease in leases:
        by_user.setdefault(lease.user, []).append(lease)
    found = []
    for user, held in sorted(by_user.items(), key=lambda item: -len(item[1]))[:most]:
        pids = sorted({lease.process.pid for lease in held if lease.process is not None})
        shown = ", ".join(map(str, pids[:most])) + ("…" if len(pids) > most else "")
        word = "" if not pids else f" (pid {shown})" if len(pids) == 1 else f" (pids {shown})"
        found.append(f"{'not declared' if user is None else f'user {user}'} {len(held)}{word}")
    return ", ".join(found) + ("…" if len(by_user) > most else "")
