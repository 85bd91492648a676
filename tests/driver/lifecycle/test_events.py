# SPDX-License-Identifier: Apache-2.0
"""What the audit log gets to know: every attach, refusal and end, with the lease and the client."""

from __future__ import annotations

from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.driver import Role
from tests.driver.conftest import FRONT, LEASE_NS, attach, created, detach, serving
from tests.driver.test_clients import owner


def names(lifecycle: Lifecycle) -> list[tuple[str, int | None]]:
    """Events and their clients; they are taken."""
    found = [(event.name, event.client_id) for event in lifecycle.events]
    lifecycle.events.clear()
    return found


def test_every_change_of_a_lease_is_an_event() -> None:
    """Granted, refused, given back, revoked, expired; once each. A retry is none."""
    lifecycle = serving()
    lifecycle.events.clear()
    lifecycle.on_attach(attach(1, FRONT, Role.PRODUCER), 0)
    assert names(lifecycle) == []  # its memory is being made
    created(lifecycle, FRONT, 2, 0, reserved=True)
    lifecycle.on_attach(attach(1, FRONT, Role.PRODUCER), 1)
    for client_id in (2, 3, 4):
        lifecycle.on_attach(attach(client_id), 1)
    lifecycle.on_attach(attach(5, FRONT, Role.PRODUCER), 1)
    assert names(lifecycle) == [*(("lease_attached", number) for number in (1, 2, 3, 4)), ("attach_refused", 5)]
    lifecycle.on_detach(detach(501, 2), 2_000_000)
    assert lifecycle.events[-1].fields == {"lease_id": 501, "role": "CONSUMER", "reason": None, "held_ms": 1}
    lifecycle.revoke(502, "maintenance", 3)
    assert lifecycle.events[-1].fields["reason"] == "maintenance"
    assert names(lifecycle) == [("lease_detached", 2), ("lease_revoked", 3)]
    lifecycle.on_tick(LEASE_NS + 1)
    assert names(lifecycle) == [("lease_expired", 1), ("lease_expired", 4)]


def test_an_event_of_a_lease_knows_its_owner() -> None:
    """Also where the declaration came after the attach."""
    lifecycle = serving()
    lifecycle.clients.on_request(1, 77)
    lifecycle.on_attach(attach(1), 0)
    assert lifecycle.events[-1].owner is None
    lifecycle.on_identify(77, owner())
    lifecycle.on_detach(detach(500, 1), 1)
    assert lifecycle.events[-1].owner == owner()
