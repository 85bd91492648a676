# SPDX-License-Identifier: Apache-2.0
"""`tensorpool stats`: what a recording is like, as tables, as JSON, and as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from tensorpool import extras
from tensorpool.cli import format, options, spark_options
from tensorpool.cli.progress import LiveLine

if TYPE_CHECKING:
    from rich.table import Table

    from tensorpool.lake import Lake

WINDOWS: Final = 120  # about as many as a timeline has
FRAMES_PER_WINDOW: Final = 5
JOIN_S: Final = 0.1
SECOND_NS: Final = 1_000_000_000
_STEPS: Final = (1, 2, 5)


@click.command(name="stats")
@options.lake_argument
@spark_options.stream_option
@click.option("--window", metavar="TIME", help="Also per window of capture time, such as 1s or 500ms.")
@click.option(
    "--full-scale", type=float, metavar="VALUE",
    help="Count pixels from VALUE on as saturated, such as 4095.  [default: the largest of the dtype]",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw rate, gaps and latency to a PNG file."
)
@click.option("--contact-sheet", type=click.Path(path_type=Path, dir_okay=False), help="Draw frames to a PNG file.")
@click.option(
    "--frames", "count", type=click.IntRange(1, 64), default=12, show_default=True, metavar="N",
    help="How many frames the contact sheet shows.",
)  # fmt: skip
@options.json_option()
@spark_options.spark_options
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
    """Show rate, gaps, size and latency of the frames in LAKE, and statistics of their pixels.

    A gap counts in the window of the frame after it. Latency is the time from capture until the recorder read a frame.
    """
    extras.require("tensorpool stats", "spark", "pyspark")  # which brings the extra of the lake, too
    from tensorpool.lake import Lake, pictures
    from tensorpool.lake.durations import parse_duration_ns

    opened = Lake.open(lake)
    if window is not None:
        parse_duration_ns("--window", window)
    for path in filter(None, (plot, contact_sheet)):
        pictures.require_place(path)
    totals: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    streams = opened.resolve(names, "--stream")
    known = opened.names_by_id()
    if opened.files():
        totals, windows = _measure(opened, streams, window, full_scale, as_json, plot is not None, (master, conf))
    for row in (*totals, *windows):
        row["name"] = known.get(row["stream_id"])
    drawn = []
    if plot is not None:
        drawn.append(pictures.timeline(windows, plot, title=opened.uri))
    if contact_sheet is not None:
        drawn.append(
            pictures.contact_sheet(opened, contact_sheet, stream_id=streams[0] if streams else None, count=count)
        )
    if as_json:
        click.echo(msgspec.json.encode(_as_json(opened, streams, totals, windows if window else [], window)))
        return
    _print(opened, streams, totals, windows if window else [], known)
    for path in drawn:
        click.echo(f"wrote {path}")


def _measure(
    lake: Lake,
    streams: tuple[int, ...],
    window: str | None,
    full_scale: float | None,
    is_quiet: bool,
    is_plotted: bool,
    spark: tuple[str, tuple[str, ...]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Statistics per stream, and per window where these are printed or drawn. Reads each payload once."""
    with LiveLine(is_quiet=is_quiet) as line, spark_options.started(spark[0], "stats", spark[1]):
        from tensorpool.spark import analytics

        line.note(f"reading {lake.uri}")
        measured = analytics.measured_frames(lake, streams, full_scale=full_scale).cache()
        totals = _sorted(with_progress(line, lambda: spark_options.rows_of(analytics.stats(measured))))
        chosen = window or (choose_window(totals) if is_plotted and totals else None)
        windows = _sorted(spark_options.rows_of(analytics.stats(measured, chosen))) if chosen else []
        measured.unpersist()
    return totals, windows


def with_progress[T](line: LiveLine, work: Callable[[], T]) -> T:
    """The result of work that Spark does, with a line that says how much of it is done."""
    from pyspark import InheritableThread, SparkContext

    context = SparkContext._active_spark_context  # None over Spark Connect
    tracker = None if context is None else context.statusTracker()
    done: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failures.append(error)

    thread = InheritableThread(target=run, name="tensorpool-stats", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(JOIN_S)
        if tracker is None or not line.is_due:
            continue
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        tasks = sum(stage.numTasks for stage in stages if stage is not None)
        if tasks:
            finished = sum(stage.numCompletedTasks for stage in stages if stage is not None)
            line.show(f"measuring frames: {finished} of {format.counted(tasks, 'task')} done")
    if failures:
        raise failures[0]
    return done[0]


def choose_window(totals: list[dict[str, Any]]) -> str:
    """A round length that makes about a hundred windows, each with several frames of every stream."""
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
    found = {"lake": lake.uri, "streams": totals, "gaps": gaps}
    return found | ({"window": window, "windows": windows} if window else {})


def _print(
    lake: Lake,
    streams: tuple[int, ...],
    totals: list[dict[str, Any]],
    windows: list[dict[str, Any]],
    names: Mapping[int, str],
) -> None:
    if not totals:
        click.echo(f"{lake.uri} has no frames")
        return
    format.show(_totals(totals))
    if windows:
        format.show(_windows(windows))
    lost: dict[tuple[int, str], int] = {}
    for gap in lake.gaps():
        if not streams or gap.stream_id in streams:
            lost[gap.stream_id, gap.reason] = lost.get((gap.stream_id, gap.reason), 0) + gap.hi - gap.lo
    for (stream_id, reason), frames in lost.items():
        stream = format.named(stream_id, names.get(stream_id))
        click.echo(f"{stream}: {format.counted(frames, 'frame')} missing, {reason.lower()}")


def _totals(rows: list[dict[str, Any]]) -> Table:
    """A column for each stream: there are fewer streams than statistics."""
    table = format.table("stream", *(format.stream(row["stream_id"], row["name"]) for row in rows), left=["stream"])
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("frames", lambda row: str(row["frames"])),
        ("seconds", lambda row: format.number(row["seconds"])),
        ("Hz", lambda row: format.number(row["hz"])),
        ("lost", lambda row: f"{row['lost']} in {row['gaps']}" if row["lost"] else "0"),
        ("size", lambda row: format.size(row["bytes"])),
        ("MiB/s", lambda row: format.number(row["mib_per_s"])),
        ("latency p50", lambda row: format.latency(row["p50_ms"])),
        ("latency p90", lambda row: format.latency(row["p90_ms"])),
        ("latency p99", lambda row: format.latency(row["p99_ms"])),
        ("min", lambda row: _value(row["min"])),
        ("mean", lambda row: _value(row["mean"])),
        ("max", lambda row: _value(row["max"])),
        ("std", lambda row: _value(row["std"])),
        ("NaN", lambda row: str(row["nan"])),
        ("saturated", lambda row: format.percent(row["saturated"])),
    ]
    for name, show in lines:
        table.add_row(name, *(show(row) for row in rows))
    return table


def _windows(rows: list[dict[str, Any]]) -> Table:
    table = format.table("stream", "at", "frames", "Hz", "lost", "p50", "p99", "min", "mean", "max", "saturated")
    begin_ns = min(row["start_ns"] for row in rows)
    for row in rows:
        table.add_row(
            format.stream(row["stream_id"], row["name"]),
            f"{(row['start_ns'] - begin_ns) / SECOND_NS:g} s",
            str(row["frames"]),
            format.number(row["hz"]),
            str(row["lost"]),
            *(format.latency(row[name]) for name in ("p50_ms", "p99_ms")),
            *(_value(row[name]) for name in ("min", "mean", "max")),
            format.percent(row["saturated"]),
        )
    return table


def _value(value: float | int | None) -> str:
    return format.NOTHING if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
