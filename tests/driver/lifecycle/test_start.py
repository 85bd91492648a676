# SPDX-License-Identifier: Apache-2.0
"""What a driver creates at its start, and when it announces."""

from __future__ import annotations

import sys

import pytest

from tensorpool.driver.effects import Announce, CreateEpoch
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.control import ClockDomain
from tests.driver.conftest import FRONT, PERIOD_NS, REAR, RING, attach, created, driver_config, epoch_of, serving
from tests.driver.lifecycle.conftest import outline, with_producer


def test_configured_streams_are_provisioned_at_start() -> None:
    """Memory for each, sparse, since no producer writes it yet (C4, E13)."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    assert lifecycle.on_start(0) == [CreateEpoch(FRONT, RING, False), CreateEpoch(REAR, RING, False)]


def test_a_stream_is_announced_as_soon_as_its_memory_is_there_and_not_before() -> None:
    """Without an epoch there is nothing to announce; with one it is announced at once."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    assert lifecycle.on_tick(0) == []
    assert lifecycle.announce(FRONT, 1) is None
    assert created(lifecycle, FRONT, 7, 1) == [Announce(FRONT)]
    assert outline(lifecycle.on_tick(PERIOD_NS)) == [f"announce {FRONT}"]


@pytest.mark.spec("DRV-8-03", "DRV-8-04", "WIRE-10.1.1-03")
def test_an_announce_tells_the_epoch_and_its_producer() -> None:
    """Every field, with producerId 0 while there is none (§8)."""
    lifecycle = serving()
    announce = lifecycle.announce(FRONT, 17)
    assert announce is not None
    assert (announce.stream_id, announce.producer_id, announce.epoch) == (FRONT, 0, 1)
    assert (announce.announce_timestamp_ns, announce.announce_clock_domain) == (17, ClockDomain.MONOTONIC)
    assert (announce.layout_version, announce.header_nslots, announce.header_slot_bytes) == (1, RING.nslots, 256)
    assert announce.header_region_uri == epoch_of(FRONT, 1).header_region_uri
    pools = [(p.pool_id, p.pool_nslots, p.stride_bytes, p.region_uri) for p in announce.payload_pools]
    uris = epoch_of(FRONT, 1).pool_region_uris
    assert pools == [(1, RING.nslots, 64, uris[0]), (2, RING.nslots, 128, uris[1])]
    announce = with_producer(client_id=7).announce(FRONT, 18)
    assert announce is not None
    assert (announce.producer_id, announce.epoch) == (7, 2)
    assert lifecycle.announce(4711, 17) is None


@pytest.mark.spec("WIRE-10.1.1-01")
def test_announces_come_once_per_period() -> None:
    """On the turn that finds the period over, and not again before the next is."""
    lifecycle = serving(now_ns=10)
    both = [f"announce {FRONT}", f"announce {REAR}"]
    assert lifecycle.on_tick(10 + PERIOD_NS - 1) == []
    assert outline(lifecycle.on_tick(10 + PERIOD_NS)) == both
    assert lifecycle.on_tick(10 + PERIOD_NS) == []
    assert outline(lifecycle.on_tick(10 + 5 * PERIOD_NS)) == both  # a late turn announces once
    assert lifecycle.on_tick(10 + 6 * PERIOD_NS - 1) == []


def test_an_idle_turn_returns_nothing_and_allocates_nothing() -> None:
    """Ten thousand turns between two announces leave no block behind, with leases and streams to look after."""
    lifecycle = serving()
    for client_id in range(1, 100):
        lifecycle.on_attach(attach(client_id), 0)
    lifecycle.on_tick(PERIOD_NS)
    now_ns = PERIOD_NS + 1
    results = {id(lifecycle.on_tick(now_ns)) for _ in range(100)}
    grown = []
    for _ in range(3):  # other threads of this process allocate now and then, not in every round
        before = sys.getallocatedblocks()
        for _ in range(10_000):
            lifecycle.on_tick(now_ns)
        grown.append(sys.getallocatedblocks() - before)
    assert len(results) == 1  # not even an empty list
    assert lifecycle.on_tick(now_ns) == []
    assert min(grown) < 10
