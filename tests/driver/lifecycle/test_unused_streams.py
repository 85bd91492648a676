# SPDX-License-Identifier: Apache-2.0
"""When the driver drops a stream that no client uses any more."""

from __future__ import annotations

import pytest

from tensorpool.control.provisioning import ProvisionRequest
from tensorpool.driver.effects import CreateEpoch, DropStream
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.driver.streams import NoStream
from tensorpool.wire.driver import Role, ShutdownReason
from tests.driver.conftest import (
    DYNAMIC,
    FRONT,
    PERIOD_NS,
    REAR,
    SECOND_NS,
    attach,
    created,
    detach,
    keepalive,
    serving,
)
from tests.driver.lifecycle.conftest import CREATE, outline

LINGER_NS = 10 * SECOND_NS


def with_dynamic_stream() -> Lifecycle:
    """A driver that has made DYNAMIC[0] for consumer 1, lease 500, and lets streams linger for ten seconds."""
    lifecycle = serving({"policies.dynamic_stream_linger_ms": LINGER_NS // 1_000_000})
    lifecycle.on_attach(attach(1, DYNAMIC[0], publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[0], 1)
    return lifecycle


def drops(lifecycle: Lifecycle, until_ns: int, *, from_ns: int = 0) -> list[int]:
    """When, turn by turn at every announce, a stream was dropped."""
    times = range(from_ns, until_ns + 1, PERIOD_NS)
    return [now_ns for now_ns in times if any("drop" in words for words in outline(lifecycle.on_tick(now_ns)))]


def test_a_dynamic_stream_goes_some_time_after_its_last_lease() -> None:
    """Then it is announced no more, its id is free, and who wants it has it made again."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), SECOND_NS)
    assert drops(lifecycle, LINGER_NS, from_ns=SECOND_NS) == []
    effects = outline(lifecycle.on_tick(SECOND_NS + LINGER_NS))
    assert effects == [f"drop {DYNAMIC[0]}", f"announce {FRONT}", f"announce {REAR}"]
    assert lifecycle.announce(DYNAMIC[0], 0) is None
    assert outline(lifecycle.on_attach(attach(2, DYNAMIC[0]), 0)) == ["attach REJECTED"]
    again = attach(2, 0, Role.PRODUCER, publish_mode=CREATE)
    assert outline(lifecycle.on_attach(again, 0)) == [f"create {DYNAMIC[0]} for a producer"]


def test_a_stream_that_is_used_or_configured_is_never_dropped() -> None:
    """However long it lasts."""
    lifecycle = with_dynamic_stream()
    for now_ns in range(0, 5 * LINGER_NS, SECOND_NS):
        lifecycle.on_keepalive(keepalive(500, 1, DYNAMIC[0]), now_ns)
        assert not any("drop" in words for words in outline(lifecycle.on_tick(now_ns)))
    assert len(lifecycle.streams) == 3


def test_a_stream_lingers_from_its_last_lease_not_from_its_first_silence() -> None:
    """A client that comes and goes between two announces counts too."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    assert drops(lifecycle, LINGER_NS - SECOND_NS) == []
    lifecycle.on_attach(attach(2, DYNAMIC[0]), LINGER_NS - 2)
    lifecycle.on_detach(detach(501, 2, DYNAMIC[0]), LINGER_NS - 1)
    assert drops(lifecycle, 3 * LINGER_NS, from_ns=LINGER_NS) == [2 * LINGER_NS]


def test_a_stream_whose_memory_is_being_made_is_not_dropped() -> None:
    """The client that waits for it gets it; it lingers anew afterwards."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    lifecycle.on_tick(PERIOD_NS)
    lifecycle.on_attach(attach(7, DYNAMIC[0], Role.PRODUCER), PERIOD_NS)
    assert drops(lifecycle, 3 * LINGER_NS, from_ns=2 * PERIOD_NS) == []
    lifecycle.on_epoch_failed(DYNAMIC[0], True, "full", 3 * LINGER_NS)
    first_ns = 3 * LINGER_NS + PERIOD_NS
    assert drops(lifecycle, 5 * LINGER_NS, from_ns=first_ns) == [first_ns + LINGER_NS]


def test_a_stream_between_two_epochs_is_not_dropped() -> None:
    """After its producer's end memory is being made, which a client has to use."""
    lifecycle = with_dynamic_stream()
    lifecycle.on_attach(attach(7, DYNAMIC[0], Role.PRODUCER), 0)
    created(lifecycle, DYNAMIC[0], 2, reserved=True)
    lifecycle.on_detach(detach(500, 1, DYNAMIC[0]), 0)
    lifecycle.on_detach(detach(501, 7, DYNAMIC[0], Role.PRODUCER), 0)
    assert drops(lifecycle, 3 * LINGER_NS) == []
    created(lifecycle, DYNAMIC[0], 3, 3 * LINGER_NS)
    first_ns = 3 * LINGER_NS + PERIOD_NS
    assert drops(lifecycle, 5 * LINGER_NS, from_ns=first_ns) == [first_ns + LINGER_NS]


def test_a_provisioned_stream_gets_its_memory_when_its_producer_comes() -> None:
    """No epoch is made before, none of another size; without a producer it goes like every dynamic stream."""
    lifecycle = serving()
    asked = ProvisionRequest(stream_id=DYNAMIC[0], slots=8, frame_bytes=4096)
    assert lifecycle.provision(asked, 0).ring == asked.ring
    for now_s in (1, 5):
        assert f"create {DYNAMIC[0]}" not in outline(lifecycle.on_tick(now_s * SECOND_NS))
    effects = lifecycle.on_attach(attach(1, DYNAMIC[0], Role.PRODUCER, publish_mode=CREATE), 6 * SECOND_NS)
    assert [effect.ring for effect in effects if isinstance(effect, CreateEpoch)] == [asked.ring]
    larger = ProvisionRequest(stream_id=DYNAMIC[0], slots=9, frame_bytes=4096)
    with pytest.raises(NoStream, match="and a producer"):  # it is attaching
        lifecycle.provision(larger, 6 * SECOND_NS)
    lifecycle.provision(ProvisionRequest(stream_id=DYNAMIC[1], slots=1, frame_bytes=1), 7 * SECOND_NS)
    lifecycle.on_tick(8 * SECOND_NS)
    assert DropStream(DYNAMIC[1]) in lifecycle.on_tick(39 * SECOND_NS)
    lifecycle.drain(ShutdownReason.NORMAL, "", 40 * SECOND_NS)
    with pytest.raises(NoStream, match="shutting down"):
        lifecycle.provision(asked, 40 * SECOND_NS)
