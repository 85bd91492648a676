# SPDX-License-Identifier: Apache-2.0
"""Draws a snapshot of the supervisor's view as a page for a terminal of any size.

A narrow terminal gets fewer columns, a low one fewer rows, the worst first, and the number of rows that are left out.
A figure that is not measured yet is "…", one that is not known is "-". Control characters in the text of peers are
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensorpool.cli import states
from tensorpool.cli.format import MIB, NOTHING, age, counted, integer, number, printable, shape
from tensorpool.supervisor.snapshot import (
    Change,
    ChangeKind,
    ConsumerState,
    ConsumerStatus,
    ServiceStatus,
    Snapshot,
    StreamState,
    StreamStatus,
)

GAP: Final = 2  # between columns
MIN_NAME_LETTERS: Final = 8
MAX_CHANGES: Final = 8
OVERHEAD: Final = 3  # lines of a section besides its rows: a blank one, its title, its headings
MEASURING: Final = "…"
MAX_PROCESS: Final = 40  # letters of a user, pid and program

_BAD_CHANGES: Final = frozenset(
    {
        ChangeKind.STREAM_STALE,
        ChangeKind.STREAM_VANISHED,
        ChangeKind.PRODUCER_LEFT,
        ChangeKind.CONSUMER_STALE,
        ChangeKind.CONSUMER_EXPIRED,
        ChangeKind.CONSUMER_LAGGING,
        ChangeKind.CONSUMER_DROPPING,
        ChangeKind.SERVICE_STALE,
        ChangeKind.DRIVER_SHUTDOWN,
    }
)


class Column[T](msgspec.Struct, frozen=True):
    """A column: its width, its rank (the highest is left out first), and the text of its cells."""

    heading: str
    width: int
    rank: int
    cell: Callable[[T], str | Text]
    is_left: bool = False
    figure: Callable[[T], object] = lambda row: ""  # None while it is measured: it takes one or two reports


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a snapshot was taken, and the size of the page."""

    aeron_dir: str
    wall_ns: int
    width: int
    height: int | None = None  # None: unlimited
    notice: str = ""  # a warning at the top
    measuring: str = ""  # says so, until every process has reported twice


def render(snapshot: Snapshot, page: Page) -> RenderableType:
    """The page."""
    streams = sorted(snapshot.streams, key=lambda stream: (stream.name is None, stream.name, stream.stream_id))
    consumers = sorted(snapshot.consumers, key=_worst_first)
    changes = snapshot.changes[::-1]
    sections: list[tuple[str, Sequence[object], Callable[[int], RenderableType], int]] = [
        ("streams", streams, lambda rows: _table(_STREAMS, streams, page, rows), 4),
        ("consumers", consumers, lambda rows: _table(_CONSUMERS, consumers, page, rows), 4),
        ("services", snapshot.services, lambda rows: _table(_SERVICES, snapshot.services, page, rows), 2),
        ("latest changes", changes, lambda rows: _changes(changes[:rows], snapshot.taken_ns, page), 2),
    ]
    shown = [section for section in sections if section[1]]
    parts: list[RenderableType] = [*_head(snapshot, page)]
    wanted = [len(rows) if title != "latest changes" else min(len(rows), MAX_CHANGES) for title, rows, _, _ in shown]
    if page.height is not None:
        height = page.height - len(parts) - page.notice.count("\n")
        while len(shown) > 1 and height < sum(_lines(len(rows), least) for _, rows, _, least in shown):
            shown.pop()  # a low terminal: leave out the section that matters least
        room = height - len(shown) * OVERHEAD
        wanted = _share(wanted[: len(shown)], [least for *_, least in shown], room)
    for (title, rows, draw, _), count in zip(shown, wanted, strict=True):
        left = len(rows) - count
        is_cut = left > 0 and title != "latest changes"
        parts.append(Text())
        parts.append(_title(title, f"{left} more" if is_cut else ""))
        parts.append(draw(count))
    return Group(*parts)


# --- the head


def _head(snapshot: Snapshot, page: Page) -> list[Text]:
    live = [stream for stream in snapshot.streams if stream.state is StreamState.LIVE]
    time = datetime.fromtimestamp(page.wall_ns / 1e9).strftime("%H:%M:%S")
    measuring = f"  {page.measuring}" if page.measuring else ""
    where = f"  {printable(page.aeron_dir)}  "
    first = Text.assemble(("tensorpool", "bold"), (measuring, states.QUIET), where, (time, "dim"))
    is_measured = all(stream.rate_hz is not None for stream in live)
    hz = number(sum(stream.rate_hz or 0.0 for stream in live)) if is_measured else MEASURING
    rate = _mib(sum(stream.bytes_per_s or 0.0 for stream in live)) if is_measured else MEASURING
    second = Text()
    second.append(counted(len(snapshot.streams), "stream"), "bold")
    second.append(f" {hz} Hz {rate} MiB/s" if live else "")
    known = [_known_state(stream) if page.measuring else stream.state for stream in snapshot.streams]
    _append_states(second, filter(None, known), StreamState.LIVE)
    second.append("   ")
    second.append(counted(len(snapshot.consumers), "consumer"), "bold")
    _append_states(second, (consumer.state for consumer in snapshot.consumers), ConsumerState.OK)
    lines = [first, second]
    if page.notice:
        lines.append(Text(page.notice, style=f"bold {states.WARN}"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    if page.notice:
        lines[-1].no_wrap, lines[-1].overflow = False, "fold"
    return lines


def _append_states(
    line: Text, all_states: Iterable[StreamState | ConsumerState], fine: StreamState | ConsumerState
) -> None:
    found = list(all_states)
    for state in type(fine):
        count = found.count(state)
        if count and state is not fine:
            line.append("  ").append_text(states.shown(state, count))


def _title(heading: str, note: str) -> Text:
    title = Text(heading.upper(), style="bold")
    if note:
        title.append(f"  … {note}", "dim")
    return title


# --- tables


def _table[T](columns: Sequence[Column[T]], rows: Sequence[T], page: Page, limit: int) -> Table:
    width = page.width
    chosen = _fitting(columns, width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), collapse_padding=True, header_style="dim")
    cells = [[_cell(column, row, page) for column in chosen] for row in rows[:limit]]
    for index, column in enumerate(chosen):
        is_flexible = column.rank == 0
        others = sum(_width(chosen, cells, other) for other in range(len(chosen)) if other != index)
        table.add_column(
            column.heading,
            justify="left" if column.is_left else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max(MIN_NAME_LETTERS, width - others - GAP) if is_flexible else None,
        )
    for row in cells:
        table.add_row(*row)
    return table


def _cell[T](column: Column[T], row: T, page: Page) -> Text:
    cell = MEASURING if page.measuring and column.figure(row) is None else column.cell(row)
    return cell if isinstance(cell, Text) else Text(cell)


def _width[T](columns: Sequence[Column[T]], cells: list[list[Text]], index: int) -> int:
    """The width of a column with these cells."""
    return max(len(columns[index].heading), *(row[index].cell_len for row in cells), 0) + GAP


def _fitting[T](columns: Sequence[Column[T]], width: int) -> list[Column[T]]:
    """The columns that fit, in their order; those of the lowest rank are chosen first."""
    chosen: list[Column[T]] = []
    left = width
    for column in sorted(columns, key=lambda column: column.rank):
        if chosen and left < column.width + GAP:
            break
        chosen.append(column)
        left -= column.width + GAP
    return [column for column in columns if column in chosen]


def _lines(rows: int, least: int) -> int:
    """The fewest lines that a section takes."""
    return OVERHEAD + min(rows, least)


def _share(wanted: list[int], least: list[int], room: int) -> list[int]:
    """Rows for each section: first the minimum of each, then the remaining ones from the top."""
    given = [max(1, min(want, few, room)) for want, few in zip(wanted, least, strict=True)]
    left = room - sum(given)
    for index, want in enumerate(wanted):
        more = max(0, min(want - given[index], left))
        given[index] += more
        left -= more
    return given


def _changes(changes: Sequence[Change], taken_ns: int, page: Page) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    is_wide = page.width >= 100
    table.add_column(no_wrap=True, style="dim", min_width=8)
    if is_wide:
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for change in changes:
        when = datetime.fromtimestamp((page.wall_ns - taken_ns + change.at_ns) / 1e9).strftime("%H:%M:%S")
        style = states.WARN if change.kind in _BAD_CHANGES else states.GOOD
        kind = [Text(str(change.kind), style)] if is_wide else []
        table.add_row(Text(when), *kind, Text(printable(change.text), "" if is_wide else style))
    return table


# --- cells


def _mib(value: float | None) -> str:
    return NOTHING if value is None else number(value / MIB)


def _epoch(value: int | None) -> str:
    """Epochs of a new host begin with the time in nanoseconds: only their last digits differ."""
    text = integer(value)
    return text if len(text) <= 7 else "…" + text[-6:]


def _age(value_ns: int | None) -> str:
    return age(None if value_ns is None else value_ns / 1e9)


def _frame(stream: StreamStatus) -> str:
    if stream.shape is None or stream.dtype is None:
        return NOTHING
    return f"{shape(stream.shape)} {stream.dtype}"


def _known_state(stream: StreamStatus) -> StreamState | None:
    """None before its seq is known: whether it moves takes that."""
    return None if stream.seq is None and stream.state is StreamState.IDLE else stream.state


def _lag(consumer: ConsumerStatus) -> Text:
    style = states.WARN if consumer.is_lagging or consumer.state is ConsumerState.STALE else ""
    return Text(integer(consumer.lag), style=style)


def _lost(consumer: ConsumerStatus) -> Text:
    by_reason = (consumer.drops_gap, "gap"), (consumer.drops_late, "late")
    text = ", ".join(f"{count} {reason}" for count, reason in by_reason if count) or "0"
    return Text(text, style=states.WARN if consumer.is_dropping else "")


def _rate(value: float | None, state: StreamState, show: Callable[[float | None], str]) -> str:
    """A live stream whose rate is not known is being measured."""
    return MEASURING if value is None and state is StreamState.LIVE else show(value)


def _process(text: str | None) -> str:
    return NOTHING if text is None else printable(text, MAX_PROCESS)


def _mode(consumer: ConsumerStatus) -> str:
    if consumer.mode != "RATE_LIMITED":
        return (consumer.mode or NOTHING).lower()
    return f"limited {consumer.max_rate_hz} Hz" if consumer.max_rate_hz else "limited"


def _worst_first(consumer: ConsumerStatus) -> tuple[int, int, int]:
    return list(ConsumerState).index(consumer.state), consumer.stream_id, consumer.consumer_id


_STREAMS: Final[list[Column[StreamStatus]]] = [
    Column("stream", 16, 0, lambda it: Text(printable(it.name or NOTHING), style="bold"), is_left=True),
    Column("id", 6, 1, lambda it: str(it.stream_id)),
    Column("Hz", 7, 2, lambda it: _rate(it.rate_hz, it.state, number), figure=lambda it: it.rate_hz),
    Column("MiB/s", 7, 4, lambda it: _rate(it.bytes_per_s, it.state, _mib), figure=lambda it: it.bytes_per_s),
    Column("readers", 7, 5, lambda it: str(it.consumers)),
    Column("seq", 9, 8, lambda it: integer(it.seq), figure=lambda it: it.seq),
    Column("moved", 7, 6, lambda it: _age(it.frame_age_ns), figure=lambda it: it.frame_age_ns),
    Column("epoch", 7, 7, lambda it: _epoch(it.epoch)),
    Column("announced", 9, 10, lambda it: _age(it.announced_age_ns)),
    Column("producer", 10, 9, lambda it: integer(it.producer_id)),
    Column("process", 24, 12, lambda it: _process(it.producer), is_left=True, figure=lambda it: it.producer),
    Column("frame", 20, 11, _frame, figure=lambda it: it.shape),
    Column("state", 13, 3, lambda it: states.shown(it.state), is_left=True, figure=_known_state),
]
_CONSUMERS: Final[list[Column[ConsumerStatus]]] = [
    Column("of stream", 16, 0, lambda it: printable(it.stream_name or str(it.stream_id)), is_left=True),
    Column("consumer", 10, 1, lambda it: str(it.consumer_id)),
    Column("lag", 6, 2, _lag, figure=lambda it: it.lag),
    Column("frames lost", 11, 4, _lost),
    Column("Hz", 7, 5, lambda it: number(it.rate_hz), figure=lambda it: it.rate_hz),
    Column("seq", 9, 8, lambda it: integer(it.last_seq), figure=lambda it: it.last_seq),
    Column("reported", 8, 6, lambda it: _age(it.age_ns)),
    Column("mode", 15, 7, _mode),
    Column("process", 24, 9, lambda it: _process(it.process), is_left=True, figure=lambda it: it.process),
    Column("state", 12, 3, lambda it: states.shown(it.state), is_left=True),
]
_SERVICES: Final[list[Column[ServiceStatus]]] = [
    Column("tag", 24, 0, lambda it: printable(it.tag), is_left=True),
    Column("pid", 7, 3, lambda it: integer(it.pid)),
    Column("version", 9, 4, lambda it: printable(it.version or NOTHING)),
    Column("heartbeat", 9, 2, lambda it: _age(it.age_ns)),
    Column("state", 12, 1, lambda it: states.service_shown(printable(it.state), is_stale=it.is_stale), is_left=True),
]
