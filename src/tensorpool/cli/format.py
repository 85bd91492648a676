# SPDX-License-Identifier: Apache-2.0
"""How commands write numbers, sizes, ages, counts and tables for people.

A value that is not known is written as "-". Text that a peer chose is made printable before it reaches a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

from tensorpool.diagnosis.check_result import size as size
from tensorpool.peer_text import printable as printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

MIB: Final = 2**20
NOTHING: Final = "-"
HALF_A_DAY_S: Final = 12 * 3600
PIPE_COLUMNS: Final = 200  # the width of tables that do not go to a terminal
_AGES: Final = ((100, 1, "s"), (6000, 60, "min"), (100 * 3600, 3600, "h"))  # up to so many seconds, in this unit


def number(value: float | None) -> str:
    """At least three significant digits."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 or value == 0 else f"{value:.2f}"


def integer(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.3g} %"


def age(seconds: float | None) -> str:
    """How long ago, or how long still: "102 ms", "3.1 s", "12 min"."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for limit, scale, unit in _AGES:
        if seconds < limit:
            return f"{seconds / scale:.{1 if seconds / scale < 10 else 0}f} {unit}"
    return f"{seconds / 86400:.0f} d"


def since(at_ns: int) -> str:
    """A moment of today by its time, "10:02:31"; an earlier one with its date."""
    then = datetime.fromtimestamp(at_ns / 1e9)
    return f"{then:%H:%M:%S}" if time.time() - at_ns / 1e9 < HALF_A_DAY_S else f"{then:%Y-%m-%d %H:%M}"


def latency(milliseconds: float | None) -> str:
    """A latency: "85 µs", "3.10 ms", "12.0 s"."""
    if milliseconds is None:
        return NOTHING
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{number(milliseconds)} ms" if milliseconds >= 1 else f"{1000 * milliseconds:.0f} µs"


def shape(extents: tuple[int, ...]) -> str:
    """ "720x1280x3"; "scalar" without dimensions."""
    return "x".join(map(str, extents)) or "scalar"


def counted(count: int, noun: str) -> str:
    """ "1 stream", "2 streams"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def counts(by_reason: Mapping[str, int]) -> str:
    """The most frequent first: "overwritten 12, gap 3"; empty where all are 0."""
    ranked = sorted(by_reason.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason.lower()} {count}" for reason, count in ranked if count)


def named(stream_id: int, name: str | None) -> str:
    """A stream by the name that the user gave it: 'stream "camera" (27672)'; without a name by its id."""
    return f"stream {stream_id}" if name is None else f'stream "{printable(name)}" ({stream_id})'


def stream(stream_id: int, name: str | None) -> str:
    """The same for a column of a table: the name, or without one the id."""
    return str(stream_id) if name is None else printable(name)


def decodable(name: str | None) -> str | None:
    """A name as JSON can hold it: bytes that are not UTF-8 become escapes."""
    return None if name is None else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def table(*headings: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """An empty table without a frame; its columns are aligned to the right, but those named in `left`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return made


def console() -> Console:
    """Standard output for tables and lines; wide where it is not a terminal, so that nothing is cut off."""
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = PIPE_COLUMNS
    return made


def show(renderable: RenderableType) -> None:
    """Print a table or a page to standard output."""
    console().print(renderable)
