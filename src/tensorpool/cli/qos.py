# SPDX-License-Identifier: Apache-2.0
"""`tensorpool qos`: how producers and consumers did while a lake was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from tensorpool.cli import figures, sparks


@click.command(name="qos")
@click.argument("lake", type=click.Path(path_type=Path))
@sparks.stream_option
@click.option("--window", metavar="TIME", help="Per window of time, such as 10s.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw lag and drops to a PNG.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@sparks.spark_options
def command(
    lake: Path,
    names: tuple[str, ...],
    window: str | None,
    plot: Path | None,
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Who published, who listened, how far behind, and what they dropped, by the reports that LAKE has of it.

    Lag is in frames behind what the producer had reported by then; drops count from a consumer's beginning.
    """
    from tensorpool.spark import pictures
    from tensorpool.spark.durations import parse_duration_ns
    from tensorpool.spark.lake import Lake

    opened = Lake.open(lake)
    if window is not None:
        parse_duration_ns("--window", window)
    if plot is not None:
        pictures.require_place(plot)
    streams = opened.resolve(names, "--stream")
    rows: list[dict[str, Any]] = []
    lags: list[dict[str, Any]] = []
    if opened.tables("qos"):
        with figures.LiveLine(is_quiet=as_json) as line, sparks.started(master, "qos", conf):
            from tensorpool.spark import analytics
            from tensorpool.spark.functions import consumer_lag

            line.note(f"reading {opened.path}")
            reports = analytics.frames_of(opened, streams, "qos").cache()
            rows = sparks.rows_of(analytics.qos(reports, window))
            lags = sparks.rows_of(consumer_lag(reports)) if plot is not None else []
    rows.sort(
        key=lambda row: (row["stream_id"], row["epoch"], row["kind"] != "producer", row["client_id"], row["start_ns"])
    )
    drawn = None if plot is None else pictures.qos_timeline(lags, plot, title=f"{opened.path}")
    if as_json:
        click.echo(msgspec.json.encode({"lake": str(opened.path), "clients": rows}))
        return
    _print(rows, str(opened.path), is_windowed=window is not None)
    if drawn is not None:
        click.echo(f"drawn {drawn}")


def _print(rows: list[dict[str, Any]], path: str, *, is_windowed: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not rows:
        console.print(f"{path} has no reports of producers or consumers", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title="clients", title_justify="left", box=None, pad_edge=False, header_style="bold")
    names = ["stream", "epoch", "role", "client", *(["at"] if is_windowed else []), "reports", "over", "Hz"]
    names += ["lag mean", "lag max", "lag last", "drops gap", "drops late"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    begin_ns = min(row["start_ns"] for row in rows)
    for row in rows:
        at = [f"{(row['start_ns'] - begin_ns) / 1e9:g} s"] if is_windowed else []
        table.add_row(
            *(str(row[name]) for name in ("stream_id", "epoch", "kind", "client_id")),
            *at,
            str(row["reports"]),
            f"{row['seconds']:.1f} s",
            "-" if row["hz"] is None else figures.number(row["hz"]),
            "-" if row["lag_mean"] is None else figures.number(row["lag_mean"]),
            *(
                "-" if row[name] is None else str(row[name])
                for name in ("lag_max", "lag_last", "drops_gap", "drops_late")
            ),
        )
    console.print(table)
