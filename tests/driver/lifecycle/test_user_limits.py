# SPDX-License-Identifier: Apache-2.0
"""Limits of each user: leases, streams and bytes; a refusal names the limit and what the user holds."""

from __future__ import annotations

from typing import Any

import pytest

from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.errors import ConfigError
from tensorpool.wire.driver import ResponseCode, Role
from tests.driver.conftest import DYNAMIC, FRONT, REAR, RING, attach, created, detach, driver_config, serving
from tests.driver.lifecycle.conftest import CREATE, outline, refusal
from tests.driver.test_clients import owner

LAB, GUEST = 1, 2  # sessions of two users' processes


def shared(overrides: dict[str, Any]) -> Lifecycle:
    """Clients 10-19 are lab's, 20-29 are guest's; others have not declared themselves."""
    lifecycle = serving(overrides)
    lifecycle.on_identify(LAB, owner(8812, "lab"))
    lifecycle.on_identify(GUEST, owner(9001, "guest"))
    for number in range(10):
        lifecycle.clients.on_request(10 + number, LAB)
        lifecycle.clients.on_request(20 + number, GUEST)
    return lifecycle


def test_leases_of_a_user_are_limited() -> None:
    """Held and promised ones; another user and those that declare nothing have their own count."""
    lifecycle = shared({"policies.max_user_leases": 2})
    lifecycle.on_attach(attach(10), 0)
    lifecycle.on_attach(attach(11, REAR, Role.PRODUCER), 0)  # its memory is being made
    assert refusal(lifecycle.on_attach(attach(12), 0)) == (
        ResponseCode.REJECTED,
        "user lab holds 2 leases, and policies.max_user_leases is 2: consumer of stream 10000 by pid 8812; detach "
        "some, or have it raised",
    )
    for client_id in (20, 21, 1, 2):
        assert outline(lifecycle.on_attach(attach(client_id), 0)) == ["attach OK"]
    code, text = refusal(lifecycle.on_attach(attach(3), 0))
    assert (code, text.partition(",")[0]) == (ResponseCode.REJECTED, "user unknown holds 2 leases")
    lifecycle.on_detach(detach(500, 10), 0)
    assert outline(lifecycle.on_attach(attach(12), 0)) == ["attach OK"]


def test_streams_that_a_user_creates_are_limited() -> None:
    """Configured ones are nobody's; a stream that is refused is not left behind, one that ended makes room."""
    lifecycle = shared({"policies.max_user_streams": 1, "policies.dynamic_stream_linger_ms": 1})
    assert outline(lifecycle.on_attach(attach(10, FRONT), 0)) == ["attach OK"]
    lifecycle.on_attach(attach(11, 0, Role.PRODUCER, publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[0], 1, 0, reserved=True)
    assert refusal(lifecycle.on_attach(attach(12, 0, Role.PRODUCER, publish_mode=CREATE), 0)) == (
        ResponseCode.REJECTED,
        f"user lab has created 1 streams, and policies.max_user_streams is 1: {DYNAMIC[0]}; end some, or have it "
        "raised",
    )
    assert lifecycle.streams.get(DYNAMIC[1]) is None
    lifecycle.on_attach(attach(20, 0, Role.PRODUCER, publish_mode=CREATE), 0)
    assert lifecycle.streams.get(DYNAMIC[1]) is not None
    lifecycle.on_detach(detach(501, 11, DYNAMIC[0], role=Role.PRODUCER), 0)
    created(lifecycle, DYNAMIC[0], 2, 0)
    lifecycle.on_tick(10**9)
    lifecycle.on_tick(3 * 10**9)
    assert lifecycle.streams.get(DYNAMIC[0]) is None
    lifecycle.on_attach(attach(12, 0, Role.PRODUCER, publish_mode=CREATE), 3 * 10**9)
    assert lifecycle.streams.get(DYNAMIC[0]) is not None


def test_bytes_that_a_user_produces_are_limited() -> None:
    """With the epochs that are kept; another user has room."""
    one = 2 * RING.size_bytes
    lifecycle = shared({"policies.max_user_bytes": one})
    lifecycle.on_attach(attach(10, FRONT, Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, 0, reserved=True)
    assert refusal(lifecycle.on_attach(attach(11, REAR, Role.PRODUCER), 0)) == (
        ResponseCode.REJECTED,
        f"stream {REAR} takes {one} bytes in 2 epochs, and the streams that user lab produces take {one}; "
        f"policies.max_user_bytes is {one}. Produced: stream {FRONT} {one}; end some, or have it raised",
    )
    assert outline(lifecycle.on_attach(attach(20, REAR, Role.PRODUCER), 0)) == [f"create {REAR} for a producer"]


def test_a_refusal_names_the_process_and_since_when() -> None:
    """By the time of day."""
    lifecycle = shared({})
    lifecycle.utc_offset_ns = 1_700_000_000 * 10**9
    lifecycle.on_attach(attach(10, FRONT, Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, 0, reserved=True)
    _, text = refusal(lifecycle.on_attach(attach(20, FRONT, Role.PRODUCER), 0))
    assert "already has a producer (client 10, lease 500, pid 8812, user lab, python acquire.py, since " in text


@pytest.mark.parametrize("key", ["max_user_leases", "max_user_streams", "max_user_bytes"])
@pytest.mark.parametrize(
    "control",
    [{"control.enabled": False}, {"control.control_channel": "aeron:udp?endpoint=127.0.0.1:40123"}],
    ids=["no service", "network"],
)
def test_limits_of_users_need_a_service_that_clients_declare_to(key: str, control: dict[str, Any]) -> None:
    """Without it all clients would be one user."""
    with pytest.raises(ConfigError, match=r"policies\.max_user_"):
        driver_config({f"policies.{key}": 1} | control)
