# SPDX-License-Identifier: Apache-2.0
"""`tensorpool trace`: shows from which frames a frame was made, live or from a lake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tensorpool.cli import format, options
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from tensorpool.client.lineage import TraceStep


class _TraceId(click.ParamType[int]):
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = value if isinstance(value, int) else int(value, 0)
        except ValueError:
            number = 0
        if not 0 < number < 2**64 - 1:
            self.fail(f"{value!r} is no trace id: give a number from 1 to 2^64 - 2, decimal or 0x…", param, ctx)
        return number


@click.command(name="trace")
@click.argument("trace_id", metavar="ID", type=_TraceId())
@click.option("--lake", type=click.Path(path_type=Path), metavar="LAKE", help="Look in a recording.  [default: live]")
@click.option("--depth", type=click.IntRange(min=1), default=32, show_default=True, help="How far back to go.")
@options.timeout_option(2.0, "How long to look for links in running streams.", is_least_allowed=False)
@options.json_option("Print a list of the steps as JSON.")
@options.connection_options
def command(
    trace_id: int, lake: Path | None, depth: int, timeout: float, as_json: bool, connection: options.Connection
) -> None:
    """Show where the frame with trace id ID came from: the frames that it was made from, and theirs.

    Live, ids are found in the rings of the streams of this host, and producers send their last links again; a recording
    keeps both for good. Exit code 1: neither knows the id.
    """
    import msgspec

    steps, names = _live(trace_id, depth, timeout, connection) if lake is None else _recorded(trace_id, depth, lake)
    if not steps[0].is_known:
        place = "in the rings and links of running streams" if lake is None else f"in {lake}"
        raise TensorPoolError(f"trace id {trace_id} was not found {place}")
    if as_json:
        click.echo(msgspec.json.encode(steps))
        return
    for step in steps:
        click.echo(_line(step, names))


def _live(
    trace_id: int, depth: int, timeout: float, connection: options.Connection
) -> tuple[list[TraceStep], Mapping[int, str | None]]:
    from tensorpool.client import connect
    from tensorpool.client.live_trace import trace_live

    with connect(connection.aeron_dir, config=connection.load()) as client:
        names = {stream.stream_id: stream.data_source_name for stream in client.discover()}
        return trace_live(client, trace_id, timeout=timeout, max_depth=depth), names


def _recorded(trace_id: int, depth: int, path: Path) -> tuple[list[TraceStep], Mapping[int, str | None]]:
    from tensorpool.lake import Lake
    from tensorpool.lake.traces import trace_lake

    lake = Lake.open(path)
    return trace_lake(lake, trace_id, max_depth=depth), lake.names_by_id()


def _line(step: TraceStep, names: Mapping[int, str | None]) -> str:
    places = [
        f"{format.named(place.stream_id, names.get(place.stream_id) or None)} epoch {place.epoch} seq {place.seq}"
        f"{'' if place.time is None else f' at {place.time:%Y-%m-%d %H:%M:%S.%f}'}"
        for place in step.frames
    ]
    notes = ["see above"] if step.is_repeated else ["goes on, see --depth"] if step.is_cut else []
    return f"{'  ' * step.depth}{step.trace_id}  {'; '.join([*(places or ['no frame found']), *notes])}"
