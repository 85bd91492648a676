# SPDX-License-Identifier: Apache-2.0
"""`tensorpool ingest`: publishes what a camera, a program or a file gives."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tensorpool import pixel_formats
from tensorpool.cli import format, options, progress, publishing
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.client import connect

if TYPE_CHECKING:
    from tensorpool.sources import Ingest, Source, SourceFrame


def publishing_options(command: Callable[..., None]) -> Callable[..., None]:
    """How a source is published: --rate, --count, --seconds, …, and the driver."""
    for option in reversed(
        (
            click.option(
                "--rate",
                type=options.Number(min=0),
                metavar="HZ",
                help="Publish a file at this rate; 0: as fast as possible.  [default: by its own times, or 30]",
            ),
            options.count_option("frames"),
            options.seconds_option(),
            click.option(
                "--wait-for-consumers",
                "wanted",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="Begin once there are N consumers.",
            ),
            click.option(
                "--create/--no-create", default=True, show_default=True, help="Create the stream if it does not exist."
            ),
            options.timeout_option(5.0, "Give up when the driver has not granted it after S seconds.", least=0.1),
            options.json_option("Print the summary as JSON."),
            options.connection_options,
        )
    ):
        command = option(command)
    return command


@click.command(name="ingest")
@click.argument("stream")
@click.option("--opencv", metavar="DEVICE|FILE|URL", help="What OpenCV opens: 0, /dev/video0, clip.mp4, rtsp://…")
@click.option("--ffmpeg", metavar="ARGS", help="What stands before the output on ffmpeg's command line: '-i clip.mp4'.")
@click.option("--gstreamer", metavar="PIPELINE", help="A pipeline without a sink: 'v4l2src device=/dev/video0'.")
@click.option("--images", metavar="GLOB", help="Picture files, in quotes: 'shots/*.png'.")
@click.option("--npy", metavar="GLOB", help="Files of numpy, each a frame: 'steps/*.npy'.")
@click.option("--stacked", is_flag=True, help="With --npy: each entry of the first axis is a frame.")
@click.option(
    "--pixel-format",
    type=click.Choice(list(pixel_formats.FORMATS)),
    metavar="NAME",
    help="With --ffmpeg and --gstreamer: rgb24, gray, nv12, …  [default: as the source is, or rgb24]",
)
@publishing_options
def command(
    stream: str,
    opencv: str | None,
    ffmpeg: str | None,
    gstreamer: str | None,
    images: str | None,
    npy: str | None,
    stacked: bool,
    pixel_format: str | None,
    **how: Any,
) -> None:
    """Publish a camera, a video or files on STREAM: an id, or a name. Give one of the sources.

    A camera is opened again when it goes away, after longer and longer pauses; a file is played once, at its own pace.
    Ctrl-C and SIGTERM end with a summary once consumers have seen the last frame.
    """
    from tensorpool import sources

    chosen = [name for name in (opencv, ffmpeg, gstreamer, images, npy) if name is not None]
    if len(chosen) != 1:
        raise click.UsageError("give one of --opencv, --ffmpeg, --gstreamer, --images and --npy")
    if pixel_format is not None and ffmpeg is None and gstreamer is None:
        raise click.UsageError("--pixel-format goes with --ffmpeg and --gstreamer")
    if stacked and npy is None:
        raise click.UsageError("--stacked goes with --npy")
    source: Source
    if opencv is not None:
        source = sources.OpenCvSource(int(opencv) if opencv.isdecimal() else opencv)
    elif ffmpeg is not None:
        source = sources.FfmpegSource(shlex.split(ffmpeg), pixel_format=pixel_format)
    elif gstreamer is not None:
        source = sources.GStreamerSource(gstreamer, pixel_format=pixel_format)
    elif images is not None:
        source = sources.ImageSource(images)
    else:
        source = sources.NpySource(str(npy), is_stacked=stacked)
    publish(stream, source, **how)


def publish(
    stream: str,
    source: Source,
    *,
    rate: float | None,
    connection: options.Connection,
    count: int,
    seconds: float | None,
    wanted: int,
    create: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish a source until it ends, with the options of `publishing_options`, and print a summary."""
    from tensorpool.sources import Ingest

    config = connection.load()
    with (
        progress.LiveLine(is_quiet=as_json) as line,
        interruptible(),
        connect(connection.aeron_dir, config=config) as client,
        Ingest(
            client,
            options.stream_reference(stream),
            source,
            rate_hz=rate,
            create=create,
            timeout=timeout,
            wanted_consumers=wanted,
            on_state=line.on_state,
            on_problem=line.note,
        ) as ingest,
    ):
        stop = StopSignals()
        job = _Job(stream, ingest, source, line)
        until_s = None if seconds is None else time.monotonic() + seconds

        def goes_on() -> bool:
            is_time = until_s is None or time.monotonic() < until_s
            return not stop.count and is_time and not (count and job.meter.frames >= count)

        ingest.run(goes_on, job.on_frame)
        line.end()
        if ingest.producer is not None:
            publishing.drain(ingest.producer, stop)
        summary = _Summary.of(job.meter, ingest, source)
    click.echo(msgspec.json.encode(summary) if as_json else summary.text())


class _Job:
    """Shows how far it is."""

    def __init__(self, stream: str, ingest: Ingest, source: Source, line: progress.LiveLine) -> None:
        self.meter = progress.Meter()
        self._stream = stream
        self._ingest = ingest
        self._source = source
        self._line = line

    def on_frame(self, frame: SourceFrame) -> None:
        producer = self._ingest.producer
        assert producer is not None
        if not self.meter.frames:
            about = self._source.about
            kind = f" {about[pixel_formats.KEY]}" if pixel_formats.KEY in about else ""
            pace = f" at {about['rate_hz']:g} Hz" if "rate_hz" in about else ""
            self._line.note(
                f"publishing {format.named(producer.stream_id, producer.name)}: "
                f"{format.shape(frame.shape)} {frame.dtype}{kind}{pace}"
            )
        self.meter.add(frame.nbytes)
        if self._line.is_due:
            totals = self._ingest.totals
            self._line.show(
                f"{self._stream}  {self.meter.recent()}  {totals.published} published  "
                f"{sum(totals.dropped.values())} dropped  {totals.missing} missing at the source  "
                f"{totals.reconnects} reconnects"
            )


class _Summary(publishing.PublishSummary, frozen=True, kw_only=True):
    """What the source lost, and what it says of itself."""

    missing: int
    reconnects: int
    about: dict[str, Any]

    @classmethod
    def of(cls, meter: progress.Meter, ingest: Ingest, source: Source) -> _Summary:
        totals = ingest.totals
        return publishing.summarize(
            cls,
            ingest.producer,
            meter,
            published=totals.published,
            nbytes=totals.bytes,
            dropped=totals.dropped,
            missing=totals.missing,
            reconnects=totals.reconnects,
            about=dict(source.about),
        )

    def more_lines(self) -> list[str]:
        missing, reconnects = format.counted(self.missing, "frame"), format.counted(self.reconnects, "time")
        return [f"the source lost {missing} by its own times, and was opened again {reconnects}"]
