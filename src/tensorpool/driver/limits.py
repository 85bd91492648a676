# SPDX-License-Identifier: Apache-2.0
"""Limits on what clients get: leases, bytes and streams, of each user and of all together; and which pages.

A user is the account that the driver sees behind a client, or the one that the client declares where the driver cannot
look; clients that declare nothing count as one user, "unknown". A refusal names the limit and who holds what.
Holds no clock and does no IO. The keys are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from tensorpool.driver.config import DriverConfig, PoliciesSection
from tensorpool.driver.leases import Lease, holders
from tensorpool.driver.streams import Stream
from tensorpool.wire.driver import HugepagesPolicy, ResponseCode

UNKNOWN: Final = "unknown"


class LimitReached(Exception):
    """The limit, how much of it is used by whom, and what to do."""

    code: Final = ResponseCode.REJECTED


def check_leases(
    policies: PoliciesSection, user: str | None, leases: Collection[Lease], pending: Sequence[str | None]
) -> None:
    """Before one more lease; `pending` are the users of attaches that wait for memory. Raises LimitReached."""
    promised = len(leases) + len(pending)
    if promised >= policies.max_leases:
        raise LimitReached(
            f"{promised} leases are held (policies.max_leases): {holders(leases)}; detach some, or raise it"
        )
    own = [lease for lease in leases if lease.user == user]
    count = len(own) + sum(other == user for other in pending)
    if policies.max_user_leases and count >= policies.max_user_leases:
        raise LimitReached(
            f"user {user or UNKNOWN} holds {count} leases, and policies.max_user_leases is {policies.max_user_leases}: "
            f"{_each(own, _lease)}; detach some, or have it raised"
        )


def check_streams(policies: PoliciesSection, user: str | None, streams: Iterable[Stream]) -> None:
    """Before a client creates one more stream. Raises LimitReached."""
    own = [stream for stream in streams if stream.is_dynamic and stream.creator == (user or UNKNOWN)]
    if policies.max_user_streams and len(own) >= policies.max_user_streams:
        raise LimitReached(
            f"user {user or UNKNOWN} has created {len(own)} streams, and policies.max_user_streams is "
            f"{policies.max_user_streams}: {_each(own, lambda it: str(it.stream_id))}; end some, or have it raised"
        )


def check_bytes(
    config: DriverConfig, user: str | None, stream: Stream, producing: Sequence[tuple[Stream, str | None]]
) -> None:
    """Before a producer writes `stream`: what all producers' rings take together. Raises LimitReached.

    `producing` are the streams that have a producer or are getting one, each with its user.
    """
    policies = config.policies
    epochs = policies.epoch_gc_keep if policies.epoch_gc_enabled else 1

    def size(some: Iterable[Stream]) -> int:
        return epochs * sum(each.ring.size_bytes for each in some if each.ring)

    needed, taken = size([stream]), size(each for each, _ in producing)
    if policies.max_bytes and taken + needed > policies.max_bytes:
        leases = [each.producer for each, _ in producing if each.producer]
        raise LimitReached(
            f"stream {stream.stream_id} takes {needed} bytes in {epochs} epochs, and the streams of "
            f"{len(producing)} producers take {taken}; policies.max_bytes is {policies.max_bytes}. Producers: "
            f"{holders(leases) or 'none'}; end some, or raise it"
        )
    own = [each for each, its_user in producing if its_user == user]
    if policies.max_user_bytes and size(own) + needed > policies.max_user_bytes:
        raise LimitReached(
            f"stream {stream.stream_id} takes {needed} bytes in {epochs} epochs, and the streams that user "
            f"{user or UNKNOWN} produces take {size(own)}; policies.max_user_bytes is {policies.max_user_bytes}. "
            f"Produced: {_each(own, lambda it: f'stream {it.stream_id} {size([it])}') or 'none'}; end some, or have it "
            "raised"
        )


def check_pages(wanted: HugepagesPolicy, are_huge: bool) -> None:
    """E38: compare with what the regions are really backed by. Raises LimitReached."""
    if wanted is HugepagesPolicy.HUGEPAGES and not are_huge:
        raise LimitReached(
            "hugepages are required; shm.base_dir is not on hugetlbfs: mount one there, or ask for any pages"
        )
    if wanted is HugepagesPolicy.STANDARD and are_huge:
        raise LimitReached(
            "standard pages are required; shm.base_dir is on hugetlbfs: choose another, or ask for any pages"
        )


def _lease(lease: Lease) -> str:
    pid = "" if lease.process is None else f" by pid {lease.process.pid}"
    return f"{lease.role.name.lower()} of stream {lease.stream_id}{pid}"


def _each[T](items: Sequence[T], text: Callable[[T], str], most: int = 8) -> str:
    return ", ".join(map(text, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")
