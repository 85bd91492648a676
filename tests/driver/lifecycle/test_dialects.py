# SPDX-License-Identifier: Apache-2.0
"""Each request is answered in its own dialect; clients of the newer one have node ids."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.driver.effects import Effect
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.attach import Dialect
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ExtendedAttachResponse,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShutdownReason,
)
from tests.driver.conftest import FRONT, SECOND_NS, attach, created, detach, serving
from tests.driver.lifecycle.conftest import message_of, only_message, with_producer

COOLDOWN_NS = 10 * SECOND_NS


def extended(client_id: int, *, wish: int | None = None, **changed: Any) -> ExtendedAttachRequest:
    fields = msgspec.structs.asdict(attach(client_id, **changed))
    del fields["max_dims"]
    return ExtendedAttachRequest(**fields, desired_node_id=wish)


def answer(effects: list[Effect]) -> ExtendedAttachResponse:
    found = only_message(effects)
    assert type(found) is ExtendedAttachResponse
    return found


def granted(lifecycle: Lifecycle, client_id: int, wish: int | None = None, now_ns: int = 0) -> int | None:
    """The node id of a consumer that attaches."""
    found = answer(lifecycle.on_attach(extended(client_id, wish=wish), now_ns))
    assert found.code is ResponseCode.OK, found
    return found.node_id


def test_the_grants_of_both_dialects_differ_in_node_id_and_max_dims_only() -> None:
    """And in the ids of the two leases."""
    lifecycle = serving({"driver.node_id_range": "7-7"})
    specified = only_message(lifecycle.on_attach(attach(3, correlation_id=-9), 40))
    other = answer(lifecycle.on_attach(extended(4, correlation_id=-9), 40))
    assert type(specified) is ShmAttachResponse
    common = msgspec.structs.asdict(specified) | {"lease_id": other.lease_id, "node_id": 7}
    assert common.pop("max_dims") == 8
    assert other == ExtendedAttachResponse(**common)


@pytest.mark.parametrize("role", list(Role))
def test_a_refusal_has_the_dialect_of_its_request(role: Role) -> None:
    """Of requests that are refused at once, that wait for memory, and that cannot be read."""
    lifecycle = with_producer()
    refused = answer(lifecycle.on_attach(extended(0, role=role), 0))
    assert refused == ExtendedAttachResponse(
        correlation_id=1, code=ResponseCode.INVALID_PARAMS, error_message="clientId 0 is reserved"
    )
    unreadable = lifecycle.on_malformed_attach(-3, ResponseCode.INVALID_PARAMS, "no", Dialect.JANUARY_2026)
    assert answer(unreadable) == ExtendedAttachResponse(
        correlation_id=-3, code=ResponseCode.INVALID_PARAMS, error_message="no"
    )
    assert type(only_message(lifecycle.on_malformed_attach(-3, ResponseCode.REJECTED, "no"))) is ShmAttachResponse


def test_node_ids_are_unique_among_live_clients_and_rest_afterwards() -> None:
    """A detach and an expiry give them back; clients of the other dialect need none."""
    lifecycle = serving({"driver.node_id_range": "1-2", "policies.node_id_reuse_cooldown_ms": 10_000})
    lifecycle.on_attach(attach(1), 0)
    first, second = granted(lifecycle, 2), granted(lifecycle, 3)
    assert {first, second} == {1, 2}
    assert granted(lifecycle, 4) is None
    assert lifecycle.counts["node_ids_exhausted"] == 1
    lifecycle.on_detach(detach(501, 2), 0)
    assert granted(lifecycle, 5, now_ns=COOLDOWN_NS - 1) is None
    assert granted(lifecycle, 6, now_ns=COOLDOWN_NS) == first


def test_a_node_id_is_given_as_wished_for_or_refused() -> None:
    """REJECTED, with who has it; nothing is left of the refused request."""
    lifecycle = serving()
    assert granted(lifecycle, 2, wish=77) == 77
    refused = answer(lifecycle.on_attach(extended(3, wish=77, publish_mode=PublishMode.EXISTING_OR_CREATE), 0))
    assert (refused.code, refused.node_id) == (ResponseCode.REJECTED, None)
    assert refused.error_message == "node id 77 belongs to client 2; ask for another, or for any"
    streams = len(lifecycle.streams)
    lifecycle.on_attach(extended(3, wish=77, stream_id=0, publish_mode=PublishMode.EXISTING_OR_CREATE), 0)
    assert len(lifecycle.streams) == streams
    assert granted(lifecycle, 3, wish=78) == 78


def test_a_second_request_of_a_client_with_a_lease_takes_no_node_id_from_it() -> None:
    """It is refused, and the lease keeps its own."""
    lifecycle = serving()
    assert granted(lifecycle, 2, wish=77) == 77
    again = answer(lifecycle.on_attach(extended(2, wish=78, correlation_id=5), 0))
    assert again.code is ResponseCode.REJECTED
    repeated = answer(lifecycle.on_attach(extended(2, wish=77), 0))
    assert (repeated.code, repeated.node_id) == (ResponseCode.OK, 77)


def test_a_request_in_the_other_dialect_is_no_repetition() -> None:
    """Its client has a lease already: the refusal is one that the request's sender can read."""
    lifecycle = serving()
    lifecycle.on_attach(attach(2), 0)
    refused = answer(lifecycle.on_attach(extended(2), 0))
    assert refused.code is ResponseCode.REJECTED
    assert "already holds lease 500" in refused.error_message


def test_a_producer_that_waited_for_memory_keeps_its_node_id_until_it_is_refused() -> None:
    """Reserved while it waits; returned, to rest, when the memory cannot be made or the driver ends."""
    lifecycle = serving()
    lifecycle.on_attach(extended(2, wish=5, role=Role.PRODUCER), 0)
    assert answer(lifecycle.on_attach(extended(3, wish=5), 0)).code is ResponseCode.REJECTED
    refused = message_of(lifecycle.on_epoch_failed(FRONT, True, "full", 0)[0])
    assert (type(refused), refused.code) == (ExtendedAttachResponse, ResponseCode.INTERNAL_ERROR)
    assert len(lifecycle.node_ids) == 0
    lifecycle.on_attach(extended(4, wish=5, role=Role.PRODUCER), COOLDOWN_NS)
    given = message_of(created(lifecycle, FRONT, 2, COOLDOWN_NS, reserved=True)[0])
    assert (type(given), given.node_id) == (ExtendedAttachResponse, 5)
    lifecycle.on_attach(extended(6, wish=9, role=Role.PRODUCER, stream_id=10_001), COOLDOWN_NS)
    ended = lifecycle.drain(ShutdownReason.NORMAL, "", COOLDOWN_NS)
    assert type(message_of(ended[0])) is ExtendedAttachResponse
    assert len(lifecycle.node_ids) == 1
