# SPDX-License-Identifier: Apache-2.0
"""`tensorpool export`: writes frames of a lake or of a live stream as files that other programs read."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tensorpool.cli import format, options, progress
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.errors import ConfigError
from tensorpool.exports import FORMATS

if TYPE_CHECKING:
    from tensorpool.exports.frames import Frames
    from tensorpool.exports.job import Outcome, Request
    from tensorpool.lake.recording import RecordedStream, Recording


@click.command(name="export")
@click.argument("source", metavar="LAKE|STREAM")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    metavar="NAME",
    help="png, tiff or npy: a folder of files; mp4, zarr, hdf5, mcap; foxglove: MCAP with foxglove.RawImage.  "
    "[default: by the suffix of OUT]",
)
@click.option("--stream", metavar="NAME|ID", help="Which stream of a lake.  [default: the only one]")
@click.option("--epoch", type=int, metavar="N", help="Only frames of this epoch of the lake.")
@click.option("--from", "begin", metavar="SEQ|TIME", help="The first frame of a lake: a seq, or 2026-11-16T10:00Z.")
@click.option("--to", "end", metavar="SEQ|TIME", help="The frame after the last one of a lake: a seq, or a time.")
@click.option("--rate", type=options.Number(min=0, min_open=True), metavar="HZ",
              help="Frames a second of an MP4.  [default: as they were captured]")  # fmt: skip
@options.count_option("frames of a live stream")
@options.seconds_option("End a live stream after S seconds.")
@options.timeout_option(10.0, "Give up when a live stream is not there after S seconds.", least=0.1)
@options.json_option("Print progress and summary as lines of JSON.")
@options.connection_options
def command(
    source: str,
    out: Path,
    kind: str | None,
    stream: str | None,
    epoch: int | None,
    begin: str | None,
    end: str | None,
    rate: float | None,
    count: int,
    seconds: float | None,
    timeout: float,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Write the frames of a LAKE, or of a live STREAM from now on, to OUT.

    OUT appears when it is complete. An export that was interrupted continues when you give the same command again; one
    that is complete says so. OUT.export.json beside it lists the frames that are missing. Exit code 1: it failed.
    """
    is_lake = "://" in source or Path(source, "_delta_log").is_dir()
    if not is_lake and (Path(source).exists() or {stream, epoch, begin, end} != {None}):
        raise ConfigError("LAKE|STREAM", source, "a lake for --stream, --epoch, --from and --to, or a live stream")
    with progress.LiveLine(is_quiet=as_json) as line, interruptible(), contextlib.ExitStack() as stack:
        from tensorpool.exports.job import ExportJob, Request, format_of

        recorded = _recorded(source, stream) if is_lake else None
        name = source if recorded is None else str(recorded.name or recorded.stream_id)
        request = Request(source, name, format_of(out, kind), begin, end, epoch)
        job = ExportJob(out, request)
        outcome = job.complete()
        if outcome is None:
            frames: Frames
            if recorded is not None:
                from tensorpool.exports.frames import LakeFrames

                frames = LakeFrames(_slice(recorded, request))
            else:
                from tensorpool.client import connect
                from tensorpool.exports.frames import LiveFrames

                client = stack.enter_context(connect(connection.aeron_dir, config=connection.load()))
                reference = options.stream_reference(source)
                consumer = client.consumer(reference, timeout=timeout, on_state=line.on_state)
                frames = LiveFrames(stack.enter_context(consumer), job.known_missing)
            shown = _Progress(line, frames, as_json)
            until_s = None if seconds is None else time.monotonic() + seconds
            stop = StopSignals()

            def goes_on() -> bool:
                if frames.is_live and ((count and shown.meter.frames >= count) or _is_past(until_s)):
                    return False
                return not stop.count

            line.note(f"exporting {name} as {request.format} to {out}")
            outcome = job.run(frames, goes_on, shown.on_frame, rate)
            line.end()
    click.echo(_json("summary", outcome) if as_json else _text(outcome))


def _is_past(until_s: float | None) -> bool:
    return until_s is not None and time.monotonic() >= until_s


def _recorded(source: str, stream: str | None) -> RecordedStream:
    from tensorpool.opening import open

    recording: Recording = open(source)
    names = list(recording)
    if stream is None and len(names) != 1:
        raise ConfigError("--stream", None, f"one of the streams of {source}: {', '.join(map(str, names)) or 'none'}")
    return recording[names[0] if stream is None else options.stream_reference(stream)]


def _slice(stream: RecordedStream, request: Request) -> RecordedStream:
    part = stream if request.epoch is None else stream.epoch(request.epoch)
    for option, bounds in (("--from", slice(_bound(request.begin), None)), ("--to", slice(None, _bound(request.end)))):
        if bounds != slice(None, None):
            try:
                part = part[bounds]
            except ValueError as error:
                raise ConfigError(
                    option, request.begin or request.end, f"a seq or a time in ISO 8601: {error}"
                ) from None
    return part


def _bound(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else text


class _Progress:
    """Frames of this run, as a bar on a terminal and as lines of JSON elsewhere."""

    def __init__(self, line: progress.LiveLine, frames: Frames, as_json: bool) -> None:
        self.meter = progress.Meter()
        self._line = line
        self._frames = frames
        self._as_json = as_json
        self._report_s = time.monotonic() + 1.0

    def on_frame(self, done: int, nbytes: int) -> None:
        self.meter.add(nbytes)
        total = self._frames.total
        if self._as_json:
            if time.monotonic() >= self._report_s:
                self._report_s = time.monotonic() + 1.0
                click.echo(msgspec.json.encode({"event": "progress", "frames": done, "total": total}))
        elif self._line.is_due:
            share = "" if not total else f"  {_bar(done / total)} {100 * done / total:.0f} %"
            self._line.show(f"{done}{'' if total is None else f' of {total}'} frames{share}  {self.meter.recent()}")


def _bar(share: float, width: int = 20) -> str:
    full = round(width * min(1.0, share))
    return "█" * full + "░" * (width - full)


def _json(event: str, outcome: Outcome) -> bytes:
    fields: dict[str, Any] = {"event": event, **msgspec.to_builtins(outcome)}
    return msgspec.json.encode(fields)


def _text(outcome: Outcome) -> str:
    lost = sum(gap.hi - gap.lo for gap in outcome.missing)
    gaps = f", {lost} missing in {format.counted(len(outcome.missing), 'gap')}" if outcome.missing else ", 0 missing"
    if not outcome.is_complete:
        return f"stopped after {outcome.frames} frames; the same command continues {outcome.path}"
    if outcome.resumed == outcome.frames:
        return f"{outcome.path} is complete already: {outcome.frames} frames{gaps}"
    resumed = f" ({outcome.resumed} of an earlier run)" if outcome.resumed else ""
    return f"wrote {outcome.path}: {outcome.frames} frames{resumed}{gaps}"
