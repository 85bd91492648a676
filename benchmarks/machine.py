# SPDX-License-Identifier: Apache-2.0
"""What the machine did while something was measured: other processes, time stolen by the hypervisor, clock, cores.

Whether two cores share a cache is measured, by a cache line that goes back and forth between them (native_pair.cpp):
the hypervisor says nothing about it and may move them at any time.
"""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.estimate import Estimate, estimate
from benchmarks.native_pair import line_ns

SHARED_NS = 100.0  # one way: a line that takes longer does not come from a cache that both cores have
QUIET = 0.2  # of a core: what else may run on a machine that is measured
STOLEN = 0.02  # of a core


class Ticks(msgspec.Struct, frozen=True):
    """Seconds of all cores so far, by /proc/stat."""

    at_s: float
    busy_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Ticks:
        fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        user, nice, system, _, _, interrupts, soft, steal = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
        return cls(time.monotonic(), user + nice + system + interrupts + soft, steal)


class Conditions:
    """Collects them over a run."""

    def __init__(self) -> None:
        self.others: list[float] = []  # share of a core that belongs to nobody who was measured, per measurement
        self.stolen: list[float] = []
        self.mhz: list[float] = []
        self.loads: list[float] = []
        self.line_ns: list[float] = []

    def add(self, before: Ticks, own_share: float) -> None:
        """A measurement that began at `before` and took `own_share` of a core itself."""
        after = Ticks.now()
        took_s = after.at_s - before.at_s
        self.others.append(max(0.0, (after.busy_s - before.busy_s) / took_s - own_share))
        self.stolen.append((after.stolen_s - before.stolen_s) / took_s)

    def look(self) -> None:
        """Once per round: clock rate, load, distance of the cores."""
        found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        self.mhz += map(float, found)
        self.loads.append(os.getloadavg()[0])
        if (distance := line_ns()) is not None:
            self.line_ns.append(distance)

    def lines(self) -> list[str]:
        """What to print beside the figures."""
        said = [f"{machine()['cpu']}, {os.cpu_count()} cores, Linux {platform.release()}"]
        if self.others:
            busy = sum(share > QUIET for share in self.others)
            stolen = sum(share > STOLEN for share in self.stolen)
            said.append(
                f"others took over {QUIET:.0%} of a core during {busy} of {len(self.others)} measurements, "
                f"the hypervisor over {STOLEN:.0%} during {stolen} (most: {max(self.stolen):.1%})"
            )
            if 2 * busy > len(self.others):
                said.append("NOISY: the verdicts are about a machine that others use as well")
        if self.mhz:
            said.append(f"clock {min(self.mhz):.0f} to {max(self.mhz):.0f} MHz by /proc/cpuinfo")
        if self.loads:
            said.append(f"load {min(self.loads):.1f} to {max(self.loads):.1f}")
        if distance := self.distance:
            near = sum(ns < SHARED_NS for ns in self.line_ns)
            said.append(
                f"a cache line from core to core takes {distance.text('{:.0f}')} ns: within one cache in "
                f"{near} of {distance.rounds} looks"
            )
        return said

    @property
    def distance(self) -> Estimate | None:
        return estimate(self.line_ns)

    @property
    def document(self) -> dict[str, Any]:
        return {**machine(), **vars(self)}


def machine() -> dict[str, Any]:
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
