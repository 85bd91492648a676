# SPDX-License-Identifier: Apache-2.0
"""Pictures of recordings: a timeline of rate, gaps and latency, and a contact sheet of frames. Needs no Spark.

Drawn with matplotlib into PNG files, without a display.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from tensorpool import extras, pixel_formats
from tensorpool.errors import ConfigError
from tensorpool.lake import Lake
from tensorpool.lake.recording import RecordedFrame, Recording
from tensorpool.looks import Look, NotShown, Picture, look_at, pixels_of
from tensorpool.looks.pictures import LINE, PICTURE
from tensorpool.shm.arrays import Array

BLUE: Final = "#2a6f97"
ORANGE: Final = "#e07a1f"
RED: Final = "#c1121f"
GREY: Final = "#6b7280"
INK: Final = "#1f2933"
FACE: Final = "#ffffff"
DPI: Final = 110
MAX_CELLS: Final = 64
LOOK: Final = Look(width=400, height=400)
SECOND_NS: Final = 1_000_000_000

_STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#c4c9d1",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "text.color": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
}


# --- a timeline


def timeline(rows: Iterable[Mapping[str, Any]], path: Path | str, *, title: str = "") -> Path:
    """Draw rate, lost frames and latency over time, one column of panels per stream.

    `rows` are those of `analytics.stats` with a window. Raises ConfigError where there is none.
    """
    require_place(path)
    found = sorted((dict(row) for row in rows), key=lambda row: (row["stream_id"], row["start_ns"]))
    if not found:
        raise ConfigError("timeline", "no rows", "the rows of stats with a window, of a recording with frames")
    streams = list(dict.fromkeys(row["stream_id"] for row in found))
    begin_ns = min(row["start_ns"] for row in found)
    with _figure_style() as plt:
        width = max(7.5, min(5.2 * len(streams), 26))
        figure, panels = plt.subplots(
            3, len(streams), figsize=(width, 6.4), sharex=True, squeeze=False, layout="constrained",
            height_ratios=(3, 2, 3),
        )  # fmt: skip
        for column, stream_id in enumerate(streams):
            own = [row for row in found if row["stream_id"] == stream_id]
            _draw_stream([panels[line][column] for line in range(3)], own, begin_ns, is_first=column == 0)
        figure.suptitle(title or "recording", x=0.01, ha="left", fontsize=12, fontweight="bold")
        return _save(figure, path)


def _draw_stream(panels: Sequence[Any], rows: Sequence[Mapping[str, Any]], begin_ns: int, *, is_first: bool) -> None:
    rate, lost, late = panels
    width_s = float(rows[0]["seconds"])
    at = np.array([(row["start_ns"] - begin_ns) / SECOND_NS for row in rows])
    edges, steps = _stairs(at, width_s, [float(row["hz"]) for row in rows])
    middle = at + width_s / 2
    _draw_rate(rate, edges, steps)
    frames, missing = sum(row["frames"] for row in rows), [int(row["lost"]) for row in rows]
    rate.set_title(f"stream {rows[0]['stream_id']}   {frames:,} frames, {sum(missing):,} lost")
    lost.bar(middle, missing, width=width_s * 0.9, color=RED if any(missing) else GREY)
    lost.set_ylim(0, max(max(missing) * 1.2, 1))
    lost.yaxis.get_major_locator().set_params(integer=True)
    if not any(missing):
        lost.text(0.5, 0.5, "no gaps", transform=lost.transAxes, ha="center", va="center", color=GREY)
    _draw_latency(late, middle, width_s, rows)
    late.set_xlabel(f"seconds since the start, in windows of {_span(width_s)}")
    late.set_xlim(float(edges[0]), float(edges[-1]))
    if is_first:
        rate.set_ylabel("frames a second")
        lost.set_ylabel("frames lost")
        late.set_ylabel("latency, ms")


def _draw_rate(panel: Any, edges: Array, steps: Array) -> None:
    """The windows at the ends are rarely full: they are drawn dotted, so that they are not taken for a loss."""
    panel.stairs(steps, edges, color=BLUE, fill=True, alpha=0.15, linewidth=0)
    if len(steps) > 2:
        for at in (0, len(steps) - 1):
            panel.hlines(steps[at], edges[at], edges[at + 1], color=BLUE, linewidth=1.4, linestyle=":")
        panel.stairs(steps[1:-1], edges[1:-1], color=BLUE, linewidth=1.6, baseline=None)
    else:
        panel.stairs(steps, edges, color=BLUE, linewidth=1.6, baseline=None)
    panel.set_ylim(0, max(float(np.nanmax(steps)) * 1.15, 1e-9))


def _draw_latency(panel: Any, middle: Array, width_s: float, rows: Sequence[Mapping[str, Any]]) -> None:
    """Lines end where windows are missing."""
    marker = "o" if len(rows) <= 40 else None
    breaks = np.flatnonzero(np.diff(middle) > 1.5 * width_s) + 1
    at = np.insert(middle, breaks, math.nan)
    is_drawn = False
    for name, colour, label in (("p50_ms", BLUE, "p50"), ("p90_ms", ORANGE, "p90"), ("p99_ms", RED, "p99")):
        values = np.array([math.nan if row[name] is None else float(row[name]) for row in rows])
        if not np.isnan(values).all():
            shown_values = np.insert(values, breaks, math.nan)
            panel.plot(at, shown_values, color=colour, label=label, linewidth=1.6, marker=marker, markersize=3)
            is_drawn = True
    if not is_drawn:
        panel.text(0.5, 0.5, "no capture times", transform=panel.transAxes, ha="center", va="center", color=GREY)
        return
    low, high = panel.dataLim.y0, panel.dataLim.y1
    if low > 0 and high / low > 50:
        panel.set_yscale("log")
    else:
        panel.set_ylim(min(0, low), high * 1.1 if high > 0 else 1)
    _legend(panel)


def _legend(panel: Any) -> None:
    """Above the panel, where it hides nothing."""
    panel.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=5, borderaxespad=0, fontsize=8, handlelength=1.4)


def _stairs(at: Array, width_s: float, values: Sequence[float]) -> tuple[Array, Array]:
    """Steps with their edges; where windows are missing, nothing came."""
    edges, steps = [float(at[0])], []
    for start, value in zip(at, values, strict=True):
        if start - edges[-1] > width_s / 2:
            edges.append(float(start))
            steps.append(0.0)
        edges.append(float(start) + width_s)
        steps.append(value)
    return np.array(edges), np.array(steps)


# --- who kept up


def qos_timeline(rows: Iterable[Mapping[str, Any]], path: Path | str, *, title: str = "") -> Path:
    """Draw lag and drops of every consumer over time; `rows` are those of `functions.consumer_lag`.

    Raises ConfigError where there is none.
    """
    require_place(path)
    found = sorted((dict(row) for row in rows), key=lambda row: row["received_ns"])
    if not found:
        raise ConfigError("qos_timeline", "no rows", "reports of consumers; record with QoS first")
    streams = sorted({row["stream_id"] for row in found})
    begin_ns = found[0]["received_ns"]
    with _figure_style() as plt:
        width = max(7.5, min(5.2 * len(streams), 26))
        figure, panels = plt.subplots(
            2, len(streams), figsize=(width, 5), sharex=True, squeeze=False, layout="constrained"
        )
        colours = plt.get_cmap("tab10")
        for column, stream_id in enumerate(streams):
            lag, drops = panels[0][column], panels[1][column]
            clients = sorted({row["client_id"] for row in found if row["stream_id"] == stream_id})
            for number, client_id in enumerate(clients):
                own = [row for row in found if (row["stream_id"], row["client_id"]) == (stream_id, client_id)]
                at = [(row["received_ns"] - begin_ns) / SECOND_NS for row in own]
                behind = [math.nan if row["lag"] is None else row["lag"] for row in own]
                gone = [(row["drops_gap"] or 0) + (row["drops_late"] or 0) for row in own]
                look = {"color": colours(number % 10), "linewidth": 1.6, "marker": "o", "markersize": 3}
                lag.plot(at, behind, label=f"consumer {client_id}", **look)
                drops.plot(at, gone, drawstyle="steps-post", **look)
            lag.set_title(f"stream {stream_id}")
            for panel in (lag, drops):
                panel.set_ylim(bottom=0)
                panel.yaxis.get_major_locator().set_params(integer=True)
            _legend(lag)
            drops.set_xlabel("seconds since the first report")
        panels[0][0].set_ylabel("frames behind")
        panels[1][0].set_ylabel("frames dropped so far")
        figure.suptitle(title or "consumers", x=0.01, ha="left", fontsize=12, fontweight="bold")
        return _save(figure, path)


# --- frames


class Picked(msgspec.Struct, frozen=True, eq=False):
    """A frame as it is shown, and what was done to show it."""

    frame: RecordedFrame
    seconds: float  # since the first one that is shown
    picture: Picture | None  # None where there can be none
    note: str = ""

    @property
    def what(self) -> str:
        return f"{self.frame.wire_dtype.name} {'x'.join(map(str, self.frame.shape))}"

    @property
    def line(self) -> Array | None:
        """The values of a one-dimensional frame."""
        return self.picture.pixels if self.picture is not None and self.picture.kind == LINE else None

    @property
    def aspect(self) -> float:
        """Height by width."""
        if self.picture is None or self.picture.kind == LINE:
            return 0.75
        height, width = self.picture.pixels.shape[:2]
        return float(min(max(height / width, 0.35), 1.5))


def contact_sheet(lake: Lake, path: Path | str, *, stream_id: int | None = None, count: int = 12) -> Path:
    """Draw frames of a recording, evenly spaced, with their seqs and times.

    Pictures of bytes by their pixel format, floats and wide integers stretched to their own range, one-dimensional
    frames as lines, everything else by its middle slice, which the note names. Raises ConfigError where there are no
    frames.
    """
    if not 1 <= count <= MAX_CELLS:
        raise ConfigError("contact_sheet(count)", count, f"1 to {MAX_CELLS}")
    require_place(path)
    pictures = pick(lake, stream_id, count)
    columns, lines = _grid(len(pictures))
    size = (2.7 * columns, lines * (2.6 * max(picked.aspect for picked in pictures) + 0.5) + 0.5)
    with _figure_style() as plt:
        figure, cells = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        limits = _limits([picked.line for picked in pictures if picked.line is not None])
        for index, cell in enumerate(cells.flat):
            if index < len(pictures):
                _draw_frame(cell, pictures[index], limits)
            else:
                cell.axis("off")
        kinds = list(dict.fromkeys(picked.what for picked in pictures))
        what = f"{kinds[0]}{' and others' if len(kinds) > 1 else ''}"
        title = f"stream {pictures[0].frame.stream_id}   {what}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return _save(figure, path)


def _grid(count: int) -> tuple[int, int]:
    """Columns and lines: somewhat wider than high, with few cells left empty."""
    wanted = math.sqrt(count * 1.4)
    columns = min(range(1, count + 1), key=lambda columns: (-count % columns) + 1.5 * abs(columns - wanted))
    return columns, -(-count // columns)


def _limits(lines: Sequence[Array]) -> tuple[float, float] | None:
    """One scale for all lines, so that they can be compared."""
    finite = [line[np.isfinite(line)] for line in lines]
    finite = [line for line in finite if line.size]
    if not finite:
        return None
    low, high = min(float(line.min()) for line in finite), max(float(line.max()) for line in finite)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def pick(lake: Lake, stream_id: int | None, count: int) -> list[Picked]:
    """Frames at even distances; of a file only the row groups that hold them are read."""
    recording = Recording(lake)
    known = sorted(recording[stream].stream_id for stream in recording)
    chosen = known[0] if stream_id is None and known else stream_id
    if chosen is None or chosen not in known:
        raise ConfigError("stream", stream_id, f"a recorded stream: {', '.join(map(str, known)) or 'none'}")
    found = recording[chosen].sample(count)
    at_ns = [frame.received_ns if frame.timestamp_ns is None else frame.timestamp_ns for frame in found]
    seconds = [(stamp_ns - at_ns[0]) / SECOND_NS for stamp_ns in at_ns]
    return [Picked(frame, passed, *shown(frame)) for frame, passed in zip(found, seconds, strict=True)]


def shown(frame: RecordedFrame) -> tuple[Picture | None, str]:
    """A small picture of a frame, and what was done to show it."""
    metadata = frame.metadata
    stated = pixel_formats.stated(None if metadata is None else metadata.attributes)
    try:
        picture = look_at(pixels_of(frame), LOOK, stated)
    except NotShown as error:
        return None, str(error)
    if not frame.array.size:
        return picture, "empty"
    notes = []
    if picture.axes:
        chosen = ", ".join(str(length // 2) for length in picture.axes)
        notes.append(f"slice {chosen} of {'x'.join(map(str, picture.axes))}")
    if picture.kind == PICTURE and (picture.low, picture.high) not in ((0, 255), (0, 1)):
        notes.append(f"{picture.low:.4g} to {picture.high:.4g}")
    return picture, ", ".join(notes)


def _draw_frame(cell: Any, picked: Picked, limits: tuple[float, float] | None) -> None:
    picture, line = picked.picture, picked.line
    if picture is None:
        cell.axis("off")
    elif line is not None:
        at = np.arange(len(line)) * picture.step
        cell.fill_between(at, line[:, 0], line[:, 1], color=BLUE, linewidth=1.0)
        cell.tick_params(labelsize=6)
        cell.set_box_aspect(0.75)
        cell.set_ylim(limits)
    else:
        cell.imshow(picture.pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="equal")
        cell.grid(visible=False)
        cell.set_xticks([])
        cell.set_yticks([])
    cell.set_title(f"seq {picked.frame.seq}   {_clock(picked.seconds)}", fontsize=8.5, pad=4)
    if picked.note:
        cell.set_xlabel(picked.note, fontsize=7, color=GREY, labelpad=2)


def _clock(seconds: float) -> str:
    if abs(seconds) < 60:
        return f"{seconds:.3f} s"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:04.1f}"


def _span(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


# --- matplotlib


class _figure_style:  # noqa: N801  a context, read as a phrase
    """matplotlib with our look; figures of the caller are not touched."""

    def __enter__(self) -> Any:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        self._context = mpl.rc_context(_STYLE)
        self._context.__enter__()
        return plt

    def __exit__(self, *details: Any) -> None:
        self._context.__exit__(*details)


def require_place(path: Path | str) -> Path:
    """Raises ConfigError where no picture can be written, MissingExtra without matplotlib; asked before the work."""
    extras.require("a picture", "spark", "matplotlib")
    where = Path(path).absolute()
    if where.is_dir() or not where.parent.is_dir() or not os.access(where.parent, os.W_OK):
        raise ConfigError("picture", str(path), "a file that can be written, in a directory that is there")
    return where


def _save(figure: Any, path: Path | str) -> Path:
    from matplotlib import pyplot as plt

    where = Path(path)
    try:
        figure.savefig(where, dpi=DPI, facecolor=FACE, format="png")
    except OSError as error:
        raise ConfigError("picture", str(where), f"a file that can be written ({error.strerror})") from None
    finally:
        plt.close(figure)
    return where
