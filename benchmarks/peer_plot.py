# SPDX-License-Identifier: Apache-2.0
"""The picture of `benchmarks.peers`: throughput over frame size with both readers, and latency with its tail.

Below it, where fan-out was measured: latency, CPU and goodput over the number of readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.peer_report import FAN_METRICS, FANS, MEMCPY, OURS, RATE_HZ, Figures

COLOURS = {
    OURS: "#d1495b",
    "iceoryx2 poll": "#30638e",
    "iceoryx2 event": "#7ba7cc",
    "zenoh SHM": "#5b8c5a",
    "shared_memory + pipe": "#b08968",
    "pyzmq ipc": "#8e7dbe",
    "eCAL SHM": "#d98e04",
    MEMCPY: "#9a9a9a",
}
MARKERS = {OURS: "o", "iceoryx2 poll": "s", "iceoryx2 event": "D", "zenoh SHM": "^", "pyzmq ipc": "v"}
INK = "#333333"
FAN_SHOWN = ("fan-out latency p50", "fan-out CPU", "fan-out goodput")


def draw(figures: Figures, peers: list[str], sizes: dict[str, int], file: Path) -> None:
    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "tensorpool", "text.color": INK})
    fans = list(figures.rounds.get("fan-out CPU", {}))
    rows = 2 if fans else 1
    picture = Figure(figsize=(12, 4.2 * rows), dpi=150, layout="constrained")
    axes = picture.subplots(rows, 3, squeeze=False)
    touching, copying, latency = axes[0]
    for place, metric in zip(axes[-1], FAN_SHOWN, strict=True) if fans else ():
        _fan_out(place, figures, metric, fans)
    _throughput(touching, figures, "touching", "Throughput, frames read in place", peers, sizes)
    _throughput(copying, figures, "copying", "Throughput, frames copied by the reader", peers, sizes)
    copying.sharey(touching)
    _latency(latency, figures, peers, sizes)
    handles, labels = touching.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    picture.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _throughput(axes: Axes, figures: Figures, reader: str, title: str, peers: list[str], sizes: dict[str, int]) -> None:
    for peer in [*peers, MEMCPY]:
        rates = {size: figures.median(f"throughput {reader}", size, peer) for size in sizes}
        points = [(sizes[size], rate * sizes[size] / (1 << 30)) for size, rate in rates.items() if rate is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=peer, **_line(peer))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("GiB/s received")
    _dress(axes, title, sizes)


def _fan_out(axes: Axes, figures: Figures, metric: str, fans: list[str]) -> None:
    """The median with its interval over the number of readers."""
    counts = [int(name.split()[0]) for name in fans]
    for peer in FANS:
        found = [(count, figures.estimate(metric, name, peer)) for count, name in zip(counts, fans, strict=True)]
        points = [(count, value) for count, value in found if value is not None]
        if points:
            middle = [value.median for _, value in points]
            spans = [
                [value.median - value.low for _, value in points],
                [value.high - value.median for _, value in points],
            ]
            axes.errorbar([count for count, _ in points], middle, yerr=spans, capsize=2, label=peer, **_line(peer))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _dress(axes, f"Fan-out of 64 KiB: {FAN_METRICS[metric]}", {str(count): count for count in counts})
    axes.set_xlabel("readers", fontsize=8)


def _latency(axes: Axes, figures: Figures, peers: list[str], sizes: dict[str, int]) -> None:
    """A point at p50 with a whisker up to p99, the peers side by side at each size."""
    shown = [peer for peer in peers if any(figures.median("latency p50", size, peer) for size in sizes)]
    for place, peer in enumerate(shown):
        shift = 1.16 ** (place - (len(shown) - 1) / 2)
        at, half, tail = [], [], []
        for size, size_bytes in sizes.items():
            p50, p99 = figures.median("latency p50", size, peer), figures.median("latency p99", size, peer)
            if p50 is not None and p99 is not None:
                at.append(size_bytes * shift)
                half.append(p50)
                tail.append(p99 - p50)
        style = _line(peer) | {"linestyle": "none"}
        axes.errorbar(at, half, yerr=([0.0] * len(at), tail), elinewidth=1.2, capsize=2, label=peer, **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("µs")
    _dress(axes, f"Latency at {RATE_HZ:.0f} Hz: p50, whisker to p99", sizes)


def _line(peer: str) -> dict[str, Any]:
    is_ours, is_yardstick = peer == OURS, peer == MEMCPY
    return {
        "color": COLOURS.get(peer, INK),
        "linewidth": 2.4 if is_ours else 1.3,
        "linestyle": "--" if is_yardstick else "-",
        "marker": None if is_yardstick else MARKERS.get(peer, "P"),
        "markersize": 6 if is_ours else 4.5,
        "zorder": 3 if is_ours else 2,
    }


def _dress(axes: Axes, title: str, sizes: dict[str, int]) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes.values()), list(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
