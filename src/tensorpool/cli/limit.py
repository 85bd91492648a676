# SPDX-License-Identifier: Apache-2.0
"""`tensorpool limit`: publishes at most so many frames a second of a stream as another stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool.cli import format, options, progress
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.client import connect

if TYPE_CHECKING:
    from tensorpool.client.rate_limiter import Limited

ATTACH_S: Final = 1e9  # until there is a producer
MAX_RATE_HZ: Final = 1_000_000
SLICE_S: Final = 0.1  # the longest time that a signal waits


@click.command(name="limit")
@click.argument("source")
@click.option("--rate", "rate_hz", type=options.Number(0, MAX_RATE_HZ, min_open=True), required=True, metavar="HZ",
              help="Publish at most HZ frames a second; 0.5 is one in two seconds.")  # fmt: skip
@click.option("--to", "target", required=True, metavar="STREAM", help="The stream to publish, an id or a name.")
@options.count_option("frames")
@options.json_option("Print the summary as JSON.")
@options.connection_options
def command(
    source: str, rate_hz: float, target: str, count: int, as_json: bool, connection: options.Connection
) -> None:
    """Publish at most HZ frames a second of SOURCE, an id or a name, as another stream.

    Seqs, timestamps and metadata are those of the source, so a consumer of the slower stream finds the gaps between its
    frames in their seqs. Ctrl-C and SIGTERM end with a summary.
    """
    from tensorpool.client.rate_limiter import RateLimiter

    config = connection.load()
    source_stream, target_stream = map(options.stream_reference, (source, target))
    if source_stream == target_stream:
        raise click.UsageError(f"--to {target}: give another stream than SOURCE")
    with (
        progress.LiveLine(is_quiet=as_json) as line,
        interruptible(),
        connect(connection.aeron_dir, config=config) as client,
    ):
        with line.noting_a_wait(f"waiting for {source}: no producer, or no lease of the driver, so far"):
            limiter = RateLimiter(client, source_stream, target_stream, rate_hz=rate_hz, timeout=ATTACH_S)
        with limiter:
            stop = StopSignals()
            line.note(f"{source} to {target}, at most {rate_hz:g} Hz")
            while not stop.count and (not count or limiter.counts.published < count):
                limiter.step(SLICE_S)
                if line.is_due:
                    line.show(_text(limiter.counts))
            line.end()
            counts = limiter.counts
    click.echo(msgspec.json.encode(counts) if as_json else _text(counts))


def _text(counts: Limited) -> str:
    dropped = format.counts(counts.dropped)
    return (
        f"{counts.published} frames published, {counts.skipped} skipped to keep the rate, {counts.lost} lost"
        f"{f', dropped: {dropped}' if dropped else ''}"
    )
