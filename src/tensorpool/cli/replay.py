# SPDX-License-Identifier: Apache-2.0
"""`tensorpool replay`: publishes a recording again, as its source did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click
import msgspec

from tensorpool.cli import format, options, progress
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.client import connect
from tensorpool.errors import ConfigError

if TYPE_CHECKING:
    from tensorpool.lake import Lake
    from tensorpool.lake.replay import Part, Replay, Summary

_SEQ: Final = re.compile("[0-9]{1,19}")


def _speed(text: str) -> float | None:
    """Type of an option: 1.0, 2.0, or max."""
    if text == "max":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise click.BadParameter(f"{text!r}: give a factor such as 1.0 or 2.0, or max")
    return value


@click.command(name="replay")
@options.lake_argument
@click.option(
    "--stream",
    "names",
    multiple=True,
    metavar="NAME|ID",
    help="A recorded stream to replay; may be given several times.  [default: all]",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME|ID",
    help="The stream to publish on, one per --stream.  [default: the recorded one]",
)
@click.option("--speed", default="1.0", show_default=True, metavar="FACTOR|max", help="Speed relative to the original.")
@click.option("--loop", is_flag=True, help="Start over at the end.")
@click.option(
    "--from", "begin", metavar="SEQ|TIME", help="The first frame: a seq, or a time since the start such as 10s."
)
@click.option("--to", "end", metavar="SEQ|TIME", help="Where to end: the first frame that is not replayed.")
@click.option(
    "--seq",
    type=click.Choice(["preserve", "renew"]),
    default="preserve",
    show_default=True,
    help="Publish the recorded seqs, with their gaps, or count anew.",
)
@click.option(
    "--timestamps",
    type=click.Choice(["preserve", "renew"]),
    default="renew",
    show_default=True,
    help="Publish the recorded timestamps, or shift them to now.",
)
@click.option("--max-pause", metavar="TIME", help="Shorten longer pauses of the recording to TIME.")
@click.option(
    "--wait-consumers",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Begin once each stream has N consumers.",
)
@click.option("--create/--no-create", default=True, show_default=True, help="Create streams that do not exist.")
@options.json_option("Print the summary as JSON.")
@options.connection_options
def command(
    lake: Path,
    names: tuple[str, ...],
    targets: tuple[str, ...],
    speed: str,
    loop: bool,
    begin: str | None,
    end: str | None,
    seq: Literal["preserve", "renew"],
    timestamps: Literal["preserve", "renew"],
    max_pause: str | None,
    wait_consumers: int,
    create: bool,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Publish the frames of LAKE again, in their original timing, all streams in step.

    Frames keep their bytes, seqs and metadata. A frame that is missing in the recording is missing in the replay, which
    waits for as long as the original did. With --seq preserve each recorded epoch, and each round of --loop, becomes an
    epoch of its own. Ctrl-C and SIGTERM end with a summary once consumers have seen the last frame; a second signal
    ends at once.
    """
    factor = _speed(speed)
    config = connection.load()
    with progress.LiveLine(is_quiet=as_json) as line, interruptible():
        from tensorpool.lake import Lake
        from tensorpool.lake.replay import Replay, ReplayOptions

        recording = Lake.open(lake)
        parts = _parts(recording, names, targets)
        chosen = ReplayOptions(
            parts=parts,
            span=_span(begin, end),
            speed=factor,
            loop=loop,
            seq=seq,
            timestamps=timestamps,
            wait_consumers=wait_consumers,
            max_pause_ns=None if max_pause is None else _duration("--max-pause", max_pause),
            create=create,
        )
        with connect(connection.aeron_dir, config=config) as client:
            stop = StopSignals()
            replay = Replay(recording, client, chosen, pause=stop.wait, on_frame=lambda it: _show(line, it))
            line.note(_announce(parts, speed, wait_consumers))
            summary = replay.run()
            line.end()
    click.echo(msgspec.json.encode(summary) if as_json else _text(summary))


def _parts(lake: Lake, names: tuple[str, ...], targets: tuple[str, ...]) -> tuple[Part, ...]:
    """Which recorded stream is published as which; one that is chosen by its name keeps it."""
    from tensorpool.lake.replay import Part

    streams = lake.resolve(names, "--stream") or tuple(sorted({file.stream_id for file in lake.files()}))
    if not streams:
        raise ConfigError("LAKE", "no frames", "a recording with frames")
    if targets and len(targets) != len(streams):
        raise click.UsageError(f"--as: give one target for each of the {len(streams)} streams, or none")
    if len(set(targets)) != len(targets):
        raise click.UsageError("--as: give each stream once")
    published = [options.stream_reference(name) for name in targets or names]
    return tuple(Part(stream_id, name) for stream_id, name in zip(streams, published or streams, strict=True))


def _span(begin: str | None, end: str | None) -> Any:
    from tensorpool.lake.playback import Span

    bounds: dict[str, int] = {}
    for name, side, text in (("--from", "from", begin), ("--to", "to", end)):
        if text is None:
            continue
        if _SEQ.fullmatch(text):
            bounds[f"{side}_seq"] = int(text)
        else:
            bounds[f"{side}_ns"] = _duration(name, text)
    return Span(**bounds)


def _duration(name: str, text: str) -> int:
    from tensorpool.lake.durations import parse_duration_ns

    try:
        return parse_duration_ns(name, text)
    except ConfigError as error:
        raise click.BadParameter(f"{text!r}: give {error.accepted}", param_hint=name) from None


def _announce(parts: tuple[Part, ...], speed: str, wanted: int) -> str:
    names = ", ".join(str(part.target) for part in parts)
    waiting = f", waiting for {format.counted(wanted, 'consumer')}" if wanted else ""
    pace = "as fast as possible" if speed == "max" else f"at {float(speed):g}x"
    return f"replaying {names} {pace}{waiting}"


def _show(line: progress.LiveLine, replay: Replay) -> None:
    if line.is_due:
        summary = replay.summary()
        late = sum(one.late for one in summary.streams)
        line.show(f"{summary.frames} frames  {summary.seconds:.1f} s  round {summary.rounds + 1}  {late} late")


def _text(summary: Summary) -> str:
    nbytes = sum(one.bytes for one in summary.streams)
    rounds = f", {summary.rounds} rounds" if summary.rounds > 1 else ""
    lines = [f"replayed {summary.frames} frames, {format.size(nbytes)}, in {summary.seconds:.1f} s{rounds}"]
    for one in summary.streams:
        late = f"{one.late} late, the latest by {format.latency(one.most_late_ms)}" if one.late else "0 late"
        dropped = format.counts(one.dropped)
        lines.append(
            f"  {one.stream_id} as {one.target}: {one.frames} frames, {late}, "
            f"{sum(one.dropped.values())} dropped{': ' + dropped if dropped else ''}"
        )
    return "\n".join(lines)
