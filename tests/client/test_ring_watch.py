# SPDX-License-Identifier: Apache-2.0
"""Which epochs a watch sees, and how far each is: by a look at all slots, or by a search from the newest known one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.client import ring_watch
from tensorpool.client.mapped_epoch import MappedEpoch
from tensorpool.client.ring_watch import WatchedEpoch
from tensorpool.shm import AllowedBases, map_ring
from tests.support.lakes import Ring
from tests.support.processes import wait_until


@pytest.fixture
def ring(shm_dir: Path) -> Ring:
    return Ring(shm_dir, nslots=16)


@pytest.fixture
def watched(ring: Ring, shm_dir: Path) -> WatchedEpoch:
    regions = ring.part(0, 0).regions
    bases = AllowedBases((str(shm_dir),))
    mapped = map_ring(regions.ring, ring.uris, bases, stream_id=ring.stream_id, epoch=ring.epoch)
    return WatchedEpoch(regions, MappedEpoch(mapped))


@pytest.mark.parametrize("seed", range(20))
def test_without_skipped_seqs_the_search_finds_what_a_look_at_all_slots_finds(
    ring: Ring, watched: WatchedEpoch, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However many frames came since the last call, also when the ring went round."""
    monkeypatch.setattr(ring_watch, "SCAN_EVERY_NS", 10**18)
    chance = random.Random(seed)
    assert watched.recent_end() == 0
    for _ in range(30):
        ring.write(chance.choice([0, 1, 2, 3, 7, 15, 16, 17, 40]))
        assert watched.recent_end() == ring.next_seq


@pytest.mark.parametrize("seed", range(20))
def test_skipped_seqs_are_found_by_the_next_look_at_all_slots(
    ring: Ring, watched: WatchedEpoch, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Until then the search never goes back, and never past the newest frame."""
    monkeypatch.setattr(ring_watch, "SCAN_EVERY_NS", 10**18)
    chance = random.Random(seed)
    known = 0
    for _ in range(30):
        ring.write(chance.randrange(1, 20), skip=chance.choice([0, 0, 1, 5, 30]))
        found = watched.recent_end()
        assert known <= found <= ring.next_seq
        known = found
    assert watched.end == ring.next_seq
    monkeypatch.setattr(ring_watch, "SCAN_EVERY_NS", 0)
    assert watched.end == ring.next_seq
    ring.write(1, skip=5)
    assert watched.recent_end() == ring.next_seq, "it is time for one"


def test_epochs_of_producers_that_come_and_go_at_once_are_all_seen() -> None:
    """Also where one ended before it was mapped: a watch can read it, and a consumer counts what it did not receive."""
    rounds, frames = 12, 3
    with tp.local() as pool, pool.connect() as writers, pool.connect() as client:
        with writers.producer("brief", create=True) as producer:
            stream_id = producer.stream_id
            watch, consumer = client.watch(stream_id), client.consumer(stream_id)
            assert producer.wait_for_consumers()
        for _ in range(rounds):
            with writers.producer("brief") as producer:
                for _ in range(frames):
                    producer.publish(np.zeros(8, np.uint8))
                epoch = producer.epoch
            wait_until(
                lambda epoch=epoch: (epoch, frames) in [(seen.epoch, seen.end) for seen in watch.epochs],
                "the watch has the epoch",
            )

        def are_all_counted() -> bool:
            while consumer.poll() is not None:
                pass
            return consumer.stats.received + consumer.stats.lost == rounds * frames

        wait_until(are_all_counted, "every frame is received or counted")
