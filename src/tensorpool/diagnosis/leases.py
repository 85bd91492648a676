# SPDX-License-Identifier: Apache-2.0
"""Who is attached, as the driver says: asked page by page of its service. No lease is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import msgspec

from tensorpool.control import Commander
from tensorpool.control.identification import LEASES, LeaseFacts, LeasePage, LeaseQuery, read_page

MOST_PAGES: Final = 10_000


def all_leases(commander: Commander, tag: str, query: LeaseQuery, timeout: float) -> list[LeaseFacts]:
    """The leases that the query matches, in the order of their ids. Raises CommandError and RemoteProtocolError."""
    deadline_s = time.monotonic() + timeout
    return [facts for page in _pages(commander, tag, query, deadline_s) for facts in page.leases]


def _pages(commander: Commander, tag: str, query: LeaseQuery, deadline_s: float) -> Iterator[LeasePage]:
    for _ in range(MOST_PAGES):
        text = msgspec.json.encode(query).decode()
        outcome = commander.send(tag, LEASES, text, timeout=max(deadline_s - time.monotonic(), 0.0))
        page = read_page(outcome.value)
        yield page
        if page.next is None or page.next <= query.after:
            return
        query = msgspec.structs.replace(query, after=page.next)
