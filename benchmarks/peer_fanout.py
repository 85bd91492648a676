# SPDX-License-Identifier: Apache-2.0
"""One writer, many readers: latency, goodput and CPU as readers are added, and what idle ones cost the writer."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import Conditions
from benchmarks.peer import Peer, Phase
from benchmarks.peer_group import Group
from benchmarks.peer_report import Figures, Starved

SIZE, SLOTS = 64 << 10, 64
FAN_HZ = 100.0
RATED_S, UNLIMITED_S = 0.4, 0.15
SETTLE_S = 10.0


def readers_name(count: int) -> str:
    return "1 reader" if count == 1 else f"{count} readers"


def _await_delivery(group: Group) -> None:
    """Until every reader receives: eCAL's writer learns of new ones a moment later. Raises Starved if one does not."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        try:
            group.run(Phase(seconds=0.1, rate_hz=FAN_HZ))
        except Starved:
            if time.monotonic() > deadline_s:
                raise
        else:
            return


def measure(
    figures: Figures, conditions: Conditions, peer: Peer, folder: Path, fans: tuple[int, ...], rounds: int, cycle: int
) -> None:
    """Adds readers step by step, and measures each step in `rounds` short turns.

    A figure of several readers is the mean of theirs, of latency the p99 that the slowest saw. A turn in which one of
    them received nothing is counted, and has no figures.
    """
    with contextlib.closing(Group(peer, SIZE, SLOTS, folder, conditions, most=max(fans))) as group:
        for count in fans:
            group.grow(count)
            _await_delivery(group)
            conditions.look()
            name = readers_name(count)
            for turn in range(rounds):
                figures.turn = cycle * rounds + turn
                with figures.starving(peer.name):
                    _take_turn(figures, group, name)
        figures.wrong[peer.name] = figures.wrong.get(peer.name, 0) + group.wrong


def _take_turn(figures: Figures, group: Group, name: str) -> None:
    peer = group.peer
    rated = group.run(Phase(seconds=RATED_S, rate_hz=FAN_HZ))
    p50s, p99s = zip(
        *(np.percentile(np.array(sight.latencies_ns), (50, 99)) / 1e3 for sight in rated.sights),
        strict=True,
    )
    figures.add("fan-out latency p50", name, peer.name, float(statistics.mean(p50s)))
    figures.add("fan-out latency p99", name, peer.name, float(max(p99s)))
    figures.add("fan-out CPU", name, peer.name, rated.cpu)
    unlimited = group.run(Phase(seconds=UNLIMITED_S))
    rates = [sight.per_second for sight in unlimited.sights]
    figures.add("fan-out goodput", name, peer.name, sum(rates))
    # All but the first are attached and do nothing.
    idle = group.run(Phase(seconds=UNLIMITED_S), readers=1)
    figures.add("fan-out publish", name, peer.name, idle.work.us_per_frame)
