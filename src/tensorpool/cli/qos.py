# SPDX-License-Identifier: Apache-2.0
"""`tensorpool qos`: how producers and consumers kept up while a lake was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from tensorpool import extras
from tensorpool.cli import format, options, spark_options
from tensorpool.cli.progress import LiveLine


@click.command(name="qos")
@options.lake_argument
@spark_options.stream_option
@click.option("--window", metavar="TIME", help="Per window of time, such as 10s.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw lag and drops to a PNG file.")
@options.json_option()
@spark_options.spark_options
def command(
    lake: Path,
    names: tuple[str, ...],
    window: str | None,
    plot: Path | None,
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Show the producers and consumers of LAKE's recordings: rates, lag and drops, from the QoS reports in LAKE.

    Lag counts the frames that the producer had reported and the consumer had not yet seen; drops count from the
    consumer's start.
    """
    extras.require("tensorpool qos", "spark", "pyspark")  # which brings the extra of the lake, too
    from tensorpool.lake import Lake, pictures
    from tensorpool.lake.durations import parse_duration_ns

    opened = Lake.open(lake)
    if window is not None:
        parse_duration_ns("--window", window)
    if plot is not None:
        pictures.require_place(plot)
    streams = opened.resolve(names, "--stream")
    rows: list[dict[str, Any]] = []
    lags: list[dict[str, Any]] = []
    if opened.tables("qos"):
        with LiveLine(is_quiet=as_json) as line, spark_options.started(master, "qos", conf):
            from tensorpool.spark import analytics
            from tensorpool.spark.functions import consumer_lag

            line.note(f"reading {opened.uri}")
            reports = analytics.frames_of(opened, streams, "qos").cache()
            rows = spark_options.rows_of(analytics.qos(reports, window))
            lags = spark_options.rows_of(consumer_lag(reports)) if plot is not None else []
    rows.sort(
        key=lambda row: (row["stream_id"], row["epoch"], row["kind"] != "producer", row["client_id"], row["start_ns"])
    )
    known = opened.names_by_id()
    for row in rows:
        row["name"] = known.get(row["stream_id"])
    drawn = None if plot is None else pictures.qos_timeline(lags, plot, title=opened.uri)
    if as_json:
        click.echo(msgspec.json.encode({"lake": opened.uri, "clients": rows}))
        return
    _print(rows, opened.uri, is_windowed=window is not None)
    if drawn is not None:
        click.echo(f"wrote {drawn}")


def _print(rows: list[dict[str, Any]], lake: str, *, is_windowed: bool) -> None:
    if not rows:
        click.echo(f"{lake} has no reports of producers or consumers")
        return
    names = ["stream", "epoch", "role", "client", *(["at"] if is_windowed else []), "reports", "over", "Hz"]
    names += ["lag mean", "lag max", "lag last", "drops gap", "drops late"]
    table = format.table(*names, title="clients")
    begin_ns = min(row["start_ns"] for row in rows)
    for row in rows:
        at = [f"{(row['start_ns'] - begin_ns) / 1e9:g} s"] if is_windowed else []
        table.add_row(
            format.stream(row["stream_id"], row["name"]),
            *(str(row[name]) for name in ("epoch", "kind", "client_id")),
            *at,
            str(row["reports"]),
            f"{row['seconds']:.1f} s",
            format.number(row["hz"]),
            format.number(row["lag_mean"]),
            *(format.integer(row[name]) for name in ("lag_max", "lag_last", "drops_gap", "drops_late")),
        )
    format.show(table)
