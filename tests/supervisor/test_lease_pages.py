# SPDX-License-Identifier: Apache-2.0
"""Pages of leases that drivers publish: the processes behind leases, in the view."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorpool.control.identification import LeaseFacts, LeasePage
from tensorpool.supervisor.view import View
from tensorpool.wire.driver import Role
from tensorpool.wire.event import EventMessage, Format
from tests.supervisor.conftest import CONSUMER, PRODUCER, STREAM, announce, kept


def lease_page(*rows: LeaseFacts, tag: str = "service:driver:driver-01", data: bytes | None = None) -> EventMessage:
    page = msgspec.json.encode(LeasePage(leases=rows, total=len(rows))) if data is None else data
    return EventMessage(timestamp_ns=0, correlation_id=0, format=Format.STRING, tag=tag, key="leases", value=page)


def facts(lease_id: int = 5, **changed: Any) -> LeaseFacts:
    fields: dict[str, Any] = {
        "lease_id": lease_id,
        "stream_id": STREAM,
        "client_id": CONSUMER,
        "role": "CONSUMER",
        "since_ns": 0,
        "keepalive_age_ms": 0,
        "expires_in_ms": 0,
        "source": "seen",
        "pid": 8812,
        "user": "lab",
        "program": "acquire.py",
        "command": "python acquire.py",
    }
    return LeaseFacts(**fields | changed)


def test_the_driver_says_which_processes_hold_leases(view: View) -> None:
    """Of leases whose keepalives were received; the consumer's row names its process."""
    view.on_message(announce(), 0)
    view.on_message(kept(), 0)
    view.on_message(kept(PRODUCER, Role.PRODUCER, lease_id=6), 0)
    producer = facts(6, client_id=PRODUCER, role="PRODUCER", pid=9, user="root", program="grab")
    view.on_message(lease_page(facts(), facts(7), producer), 0)
    snapshot = view.snapshot(0)
    assert [(lease.lease_id, lease.holder and lease.holder.pid) for lease in snapshot.leases] == [(5, 8812), (6, 9)]
    assert snapshot.consumers[0].process == "lab 8812 acquire.py"
    assert snapshot.streams[0].producer == "root 9 grab"


def test_a_page_of_leases_is_bounded_and_believed_for_its_own_leases_only(view: View) -> None:
    """Any process may publish one: it is escaped and cut, must name the lease as its keepalives do, and is counted."""
    view.on_message(kept(), 0)
    view.on_message(lease_page(facts(client_id=CONSUMER + 1)), 0)
    view.on_message(lease_page(facts(stream_id=STREAM + 1)), 0)
    view.on_message(lease_page(facts(), tag="service:recorder"), 0)
    assert view.snapshot(0).leases[0].holder is None
    view.on_message(lease_page(data=b"{"), 0)
    view.on_message(lease_page(data=b'"' + b"x" * (1 << 20) + b'"'), 0)
    assert view.counts["lease_pages_malformed"] == 2
    view.on_message(lease_page(facts(command="\x1b[2J" + "y" * 9000, user="\x07")), 0)
    holder = view.snapshot(0).leases[0].holder
    assert holder is not None
    assert (holder.user, len(holder.command)) == (r"\x07", 200)
    assert holder.command.isprintable()
