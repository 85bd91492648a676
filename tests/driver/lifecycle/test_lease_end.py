# SPDX-License-Identifier: Apache-2.0
"""How a lease ends: detach, expiry, revocation; and what the driver sends then, in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.driver.effects import Announce, Send
from tensorpool.wire.driver import (
    LeaseRevokeReason,
    ResponseCode,
    Role,
    ShmDetachResponse,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.driver.conftest import (
    FRONT,
    LEASE_NS,
    PERIOD_NS,
    REAR,
    SECOND_NS,
    attach,
    created,
    detach,
    keepalive,
    serving,
)
from tests.driver.lifecycle.conftest import message_of, only_message, outline, with_producer


@pytest.mark.spec("DRV-4.9-01", "DRV-4.9-05", "DRV-6-04")
def test_detach_is_answered_then_published_then_followed_by_a_new_epoch() -> None:
    """E9: response, revoke, announce; in between nothing is announced, then producerId is 0."""
    lifecycle = with_producer()
    effects = lifecycle.on_detach(detach(500, 7, role=Role.PRODUCER, correlation_id=-3), 70)
    assert outline(effects) == ["detach OK", "revoked 500 DETACHED", f"create {FRONT}"]
    assert effects[:2] == [
        Send(ShmDetachResponse(correlation_id=-3, code=ResponseCode.OK)),
        Send(
            ShmLeaseRevoked(
                timestamp_ns=70,
                lease_id=500,
                stream_id=FRONT,
                client_id=7,
                role=Role.PRODUCER,
                reason=LeaseRevokeReason.DETACHED,
            )
        ),
    ]
    assert lifecycle.announce(FRONT, 71) is None
    assert outline(lifecycle.on_tick(PERIOD_NS)) == [f"announce {REAR}"]
    assert created(lifecycle, FRONT, 3, PERIOD_NS + 1) == [Announce(FRONT)]
    announce = lifecycle.announce(FRONT, PERIOD_NS + 2)
    assert announce is not None
    assert (announce.epoch, announce.producer_id) == (3, 0)


@pytest.mark.spec("DRV-6-03", "DRV-4.9-15", "DRV-4.9-05")
def test_expiry_of_a_producer_is_published_before_any_announce() -> None:
    """One turn finds both due: the revoke comes first, and the stale epoch is not announced again (§7)."""
    lifecycle = with_producer()
    effects = lifecycle.on_tick(LEASE_NS)
    assert outline(effects) == ["revoked 500 EXPIRED", f"create {FRONT}", f"announce {REAR}"]
    assert message_of(effects[0]).error_message == "no keepalive within the grace"
    assert outline(lifecycle.on_tick(LEASE_NS + PERIOD_NS)) == [f"announce {REAR}"]
    assert created(lifecycle, FRONT, 3) == [Announce(FRONT)]


@pytest.mark.spec("DRV-4.9-20")
@pytest.mark.spec("DRV-6-02", "DRV-4.7-05", "DRV-4.9-05")
def test_an_administrative_revoke_ends_a_lease_with_its_reason() -> None:
    """A producer's as an expiry does; an id that is not alive does nothing."""
    lifecycle = with_producer()
    effects = lifecycle.revoke(500, "make room", 3)
    assert outline(effects) == ["revoked 500 REVOKED", f"create {FRONT}"]
    assert message_of(effects[0]).error_message == "make room"
    assert lifecycle.revoke(500, "make room", 4) == []
    assert lifecycle.revoke(1, "", 4) == []


def test_all_leases_that_are_over_end_in_one_turn() -> None:
    """Each published once, and none twice."""
    lifecycle = with_producer()
    for client_id in (1, 2):
        lifecycle.on_attach(attach(client_id), 0)
    lifecycle.on_attach(attach(3, REAR), 1)
    effects = outline(lifecycle.on_tick(LEASE_NS))
    assert effects == [
        "revoked 500 EXPIRED",
        f"create {FRONT}",
        "revoked 501 EXPIRED",
        "revoked 502 EXPIRED",
        f"announce {REAR}",
    ]
    assert outline(lifecycle.on_tick(LEASE_NS + 1)) == ["revoked 503 EXPIRED"]
    assert lifecycle.on_tick(LEASE_NS + 2) == []


@pytest.mark.spec("DRV-7-02")
def test_a_new_producer_waits_for_both_epochs_after_the_end_of_the_last() -> None:
    """§6, §7: one for the end and one for the attach; the grant is never on the epoch of the dead one."""
    lifecycle = with_producer()
    lifecycle.on_tick(LEASE_NS)
    assert lifecycle.on_attach(attach(8, role=Role.PRODUCER), LEASE_NS) == []
    assert outline(created(lifecycle, FRONT, 3)) == [f"announce {FRONT}", f"create {FRONT} for a producer"]
    effects = created(lifecycle, FRONT, 4, reserved=True)
    assert outline(effects) == ["attach OK", f"announce {FRONT}"]
    assert message_of(effects[0]).epoch == 4


def test_a_consumer_between_two_epochs_waits_for_the_next() -> None:
    """It is not given the dead producer's memory."""
    lifecycle = with_producer()
    lifecycle.on_tick(LEASE_NS)
    assert lifecycle.on_attach(attach(3), LEASE_NS) == []
    effects = created(lifecycle, FRONT, 3, LEASE_NS)
    assert outline(effects) == [f"announce {FRONT}", "attach OK"]
    assert message_of(effects[1]).epoch == 3


@pytest.mark.spec("DRV-4.9-03")
@pytest.mark.parametrize(
    "wrong",
    [detach(501, 7, role=Role.PRODUCER), detach(500, 8, role=Role.PRODUCER), detach(500, 7, REAR), detach(500, 7)],
)
def test_a_detach_with_a_wrong_field_is_rejected_and_changes_nothing(wrong: Any) -> None:
    """E10, E11: lease, client, stream and role must all be right; the text says what was asked for."""
    lifecycle = with_producer()
    answer = only_message(lifecycle.on_detach(wrong, 0))
    text = f"no active lease {wrong.lease_id} of client {wrong.client_id} on stream {wrong.stream_id}"
    assert answer == ShmDetachResponse(correlation_id=2, code=ResponseCode.REJECTED, error_message=text)
    assert len(lifecycle.leases) == 1


@pytest.mark.spec("DRV-4.9-02", "DRV-4.9-20")
def test_a_second_detach_is_rejected_without_a_second_notice() -> None:
    """The end of a lease is published once."""
    lifecycle = with_producer()
    request = detach(500, 7, role=Role.PRODUCER)
    lifecycle.on_detach(request, 0)
    assert outline(lifecycle.on_detach(request, 0)) == ["detach REJECTED"]


@pytest.mark.spec("DRV-4.4-04")
def test_only_a_right_keepalive_keeps_a_lease() -> None:
    """E5, E6: wrong ones are counted and have no effect."""
    lifecycle = with_producer()
    for message in (
        keepalive(500, 8, role=Role.PRODUCER),
        keepalive(500, 7, REAR, Role.PRODUCER),
        keepalive(500, 7, role=Role.CONSUMER),
        keepalive(499, 7, role=Role.PRODUCER),
    ):
        lifecycle.on_keepalive(message, LEASE_NS - 1)
    assert lifecycle.counts["keepalives_wrong_fields"] == 3
    assert lifecycle.counts["keepalives_unknown_lease"] == 1
    assert outline(lifecycle.on_tick(LEASE_NS))[0] == "revoked 500 EXPIRED"
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), LEASE_NS)
    assert (len(lifecycle.leases), lifecycle.counts["keepalives_unknown_lease"]) == (0, 2)


@pytest.mark.spec("DRV-4.4-03")
def test_a_right_keepalive_moves_the_expiry() -> None:
    """A grace period from the last one."""
    lifecycle = with_producer()
    lifecycle.on_keepalive(keepalive(500, 7, role=Role.PRODUCER), LEASE_NS - 1)
    assert "revoked 500 EXPIRED" not in outline(lifecycle.on_tick(2 * LEASE_NS - 2))
    assert outline(lifecycle.on_tick(2 * LEASE_NS - 1))[0] == "revoked 500 EXPIRED"


def test_a_stall_of_the_driver_expires_no_lease() -> None:
    """Every lease gets a whole grace period from the moment the driver is back."""
    lifecycle = with_producer()
    lifecycle.on_attach(attach(3), 0)
    back_ns = 50 * SECOND_NS
    lifecycle.on_stall(back_ns)
    assert outline(lifecycle.on_tick(back_ns)) == [f"announce {FRONT}", f"announce {REAR}"]
    assert not any("revoked" in words for words in outline(lifecycle.on_tick(back_ns + LEASE_NS - 1)))
    assert outline(lifecycle.on_tick(back_ns + LEASE_NS))[0] == "revoked 500 EXPIRED"
    assert lifecycle.counts["stalls"] == 1


def test_clients_read_stamps_and_the_driver_counts_by_its_own_clock() -> None:
    """C8: every stamp is in the domain of the announces; no deadline moves by that."""
    offset_ns = 10**18
    lifecycle = serving()
    lifecycle.stamp_offset_ns = offset_ns
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    granted, _ = created(lifecycle, FRONT, 2, reserved=True)
    assert message_of(granted).lease_expiry_timestamp_ns == LEASE_NS + offset_ns
    announce = lifecycle.announce(FRONT, 5)
    assert announce is not None
    assert announce.announce_timestamp_ns == 5 + offset_ns
    assert not any("revoked" in words for words in outline(lifecycle.on_tick(LEASE_NS - 1)))
    revoked = lifecycle.on_tick(LEASE_NS)[0]
    assert message_of(revoked).timestamp_ns == LEASE_NS + offset_ns
    lifecycle.drain(ShutdownReason.NORMAL, "", LEASE_NS)
    notice = lifecycle.on_tick(LEASE_NS + 2 * SECOND_NS)[-2]
    assert message_of(notice).timestamp_ns == LEASE_NS + 2 * SECOND_NS + offset_ns
