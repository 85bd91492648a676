# SPDX-License-Identifier: Apache-2.0
"""`tensorpool stats`: what a recording is like, as tables, as JSON, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from tensorpool.cli import figures, sparks

if TYPE_CHECKING:
    from rich.table import Table

    from tensorpool.spark.lake import Lake

WINDOWS: Final = 120  # that a timeline has, more or less
FRAMES_PER_WINDOW: Final = 5
SECOND_NS: Final = 1_000_000_000
_STEPS: Final = (1, 2, 5)


@click.command(name="stats")
@click.argument("lake", type=click.Path(path_type=Path))
@sparks.stream_option
@click.option("--window", metavar="TIME", help="Per window of capture time too, such as 1s or 500ms.")
@click.option(
    "--full-scale", type=float, metavar="VALUE",
    help="Saturated from here on, such as 4095.  [default: the dtype's largest]",
)  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw rate, gaps and latency to a PNG.")
@click.option("--contact-sheet", type=click.Path(path_type=Path, dir_okay=False), help="Draw frames to a PNG.")
@click.option(
    "--frames", "count", type=click.IntRange(1, 64), default=12, show_default=True, metavar="N",
    help="On the contact sheet.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@sparks.spark_options
def command(
    lake: Path,
    names: tuple[str, ...],
    window: str | None,
    full_scale: float | None,
    plot: Path | None,
    contact_sheet: Path | None,
    count: int,
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """What the frames of LAKE are like: rate, gaps, size, latency, and their pixels.

    A gap belongs to the window of the frame after it. Latency is from capture to the recorder's reading.
    """
    from tensorpool.spark import pictures
    from tensorpool.spark.durations import parse_duration_ns
    from tensorpool.spark.lake import Lake

    opened = Lake.open(lake)
    if window is not None:
        parse_duration_ns("--window", window)
    for path in filter(None, (plot, contact_sheet)):
        pictures.require_place(path)
    totals: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    streams = opened.resolve(names, "--stream")
    if opened.files():
        totals, windows = _measure(opened, streams, window, full_scale, as_json, plot is not None, (master, conf))
    drawn = []
    if plot is not None:
        drawn.append(pictures.timeline(windows, plot, title=f"{opened.path}"))
    if contact_sheet is not None:
        drawn.append(
            pictures.contact_sheet(opened, contact_sheet, stream_id=streams[0] if streams else None, count=count)
        )
    if as_json:
        click.echo(msgspec.json.encode(_as_json(opened, streams, totals, windows if window else [], window)))
        return
    _print(opened, streams, totals, windows if window else [])
    for path in drawn:
        click.echo(f"drawn {path}")


def _measure(
    lake: Lake,
    streams: tuple[int, ...],
    window: str | None,
    full_scale: float | None,
    is_quiet: bool,
    is_plotted: bool,
    spark: tuple[str, tuple[str, ...]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of streams, and of windows where they are asked for or drawn; payloads are read once."""
    with figures.LiveLine(is_quiet=is_quiet) as line, sparks.started(spark[0], "stats", spark[1]):
        from tensorpool.spark import analytics
        from tensorpool.spark.functions import frame_stats

        line.note(f"reading {lake.path}")
        measured = frame_stats(analytics.frames_of(lake, streams), full_scale=full_scale).cache()
        totals = _sorted(sparks.rows_of(analytics.stats(measured)))
        chosen = window or (choose_window(totals) if is_plotted and totals else None)
        windows = _sorted(sparks.rows_of(analytics.stats(measured, chosen))) if chosen else []
        measured.unpersist()
    return totals, windows


def choose_window(totals: list[dict[str, Any]]) -> str:
    """A round length of which there are about a hundred, and that has several frames of every stream."""
    seconds = max(row["seconds"] or 0.0 for row in totals)
    sparse = max((row["seconds"] or 0.0) / max(row["frames"] - 1, 1) for row in totals)
    wanted_ms = max(seconds / WINDOWS, FRAMES_PER_WINDOW * sparse, 0.001) * 1000
    scale = 10 ** math.floor(math.log10(wanted_ms))
    step = next((step for step in _STEPS if step * scale >= wanted_ms), 10)
    return f"{max(1, round(step * scale))}ms"


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        for name in ("min", "max"):
            exact = row.pop(f"{name}_int")
            row[name] = row[name] if exact is None else exact
    return sorted(rows, key=lambda row: (row["stream_id"], row["start_ns"]))


def _as_json(
    lake: Lake,
    streams: tuple[int, ...],
    totals: list[dict[str, Any]],
    windows: list[dict[str, Any]],
    window: str | None,
) -> dict[str, Any]:
    gaps = [msgspec.structs.asdict(gap) for gap in lake.gaps() if not streams or gap.stream_id in streams]
    found = {"lake": str(lake.path), "streams": totals, "gaps": gaps}
    return found | ({"window": window, "windows": windows} if window else {})


def _print(lake: Lake, streams: tuple[int, ...], totals: list[dict[str, Any]], windows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console()
    if not totals:
        console.print(f"{lake.path} has no frames", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_totals(totals))
    if windows:
        console.print(_windows(windows))
    lost: dict[tuple[int, str], int] = {}
    for gap in lake.gaps():
        if not streams or gap.stream_id in streams:
            lost[gap.stream_id, gap.reason] = lost.get((gap.stream_id, gap.reason), 0) + gap.hi - gap.lo
    for (stream_id, reason), frames in lost.items():
        console.print(
            f"stream {stream_id}: {frames} frames missing, {reason.lower()}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _totals(rows: list[dict[str, Any]]) -> Table:
    """A column for each stream: there are fewer of them than of figures."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stream")
    for row in rows:
        table.add_column(str(row["stream_id"]), justify="right", no_wrap=True)
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("frames", lambda row: str(row["frames"])),
        ("seconds", lambda row: _number(row["seconds"])),
        ("Hz", lambda row: _number(row["hz"])),
        ("lost", lambda row: f"{row['lost']} in {row['gaps']}" if row["lost"] else "0"),
        ("size", lambda row: figures.size(row["bytes"])),
        ("MiB/s", lambda row: _number(row["mib_per_s"])),
        ("latency p50", lambda row: _milliseconds(row["p50_ms"])),
        ("latency p90", lambda row: _milliseconds(row["p90_ms"])),
        ("latency p99", lambda row: _milliseconds(row["p99_ms"])),
        ("min", lambda row: _value(row["min"])),
        ("mean", lambda row: _value(row["mean"])),
        ("max", lambda row: _value(row["max"])),
        ("std", lambda row: _value(row["std"])),
        ("NaN", lambda row: str(row["nan"])),
        ("saturated", lambda row: _share(row["saturated"])),
    ]
    for name, show in lines:
        table.add_row(name, *(show(row) for row in rows))
    return table


def _windows(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stream", "at", "frames", "Hz", "lost", "p50", "p99", "min", "mean", "max", "saturated"):
        table.add_column(name, justify="right", no_wrap=True)
    begin_ns = min(row["start_ns"] for row in rows)
    for row in rows:
        table.add_row(
            str(row["stream_id"]),
            f"{(row['start_ns'] - begin_ns) / SECOND_NS:g} s",
            str(row["frames"]),
            _number(row["hz"]),
            str(row["lost"]),
            *(_milliseconds(row[name]) for name in ("p50_ms", "p99_ms")),
            *(_value(row[name]) for name in ("min", "mean", "max")),
            _share(row["saturated"]),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _number(value: float | None) -> str:
    return "-" if value is None else figures.number(value)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else figures.duration_ms(value)


def _value(value: float | int | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
