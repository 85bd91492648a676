# SPDX-License-Identifier: Apache-2.0
"""`tensorpool ls`: which streams there are, as discovery says. Discovery §5, §7."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorpool.cli import options

if TYPE_CHECKING:
    from tensorpool.client.inquiry import DiscoveredStream


@click.command(name="ls")
@click.option("--name", metavar="NAME", help="Streams of this name only, letter by letter.")
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="With this tag; given twice, with both.")
@click.option("--producer", "producer_id", type=click.IntRange(0, 2**32 - 2), metavar="ID", help="0: without one.")
@click.option("--stream", "stream_id", type=click.IntRange(1, 2**32 - 2), metavar="ID")
@click.option("--driver", "driver_instance_id", metavar="INSTANCE", help="Of the driver with this instance id.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True, metavar="S")
@click.option("--json", "as_json", is_flag=True, help="Everything that is known, as one array of JSON.")
@options.connection_options
def command(
    name: str | None,
    tags: tuple[str, ...],
    producer_id: int | None,
    stream_id: int | None,
    driver_instance_id: str | None,
    timeout: float,
    as_json: bool,
    aeron_dir: str | None,
    path: Path | None,
    settings: tuple[str, ...],
) -> None:
    """List the streams of the driver here, and of the fleet where registries are configured.

    Filters are combined with AND.
    """
    from tensorpool.client.client import connect

    with connect(aeron_dir, config=options.load_config(path, settings)) as client:
        streams = client.discover(
            name,
            tags=tags,
            producer_id=producer_id,
            stream_id=stream_id,
            driver_instance_id=driver_instance_id,
            timeout=timeout,
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode([_plain(stream) for stream in streams]))
    elif streams:
        _print_table(streams)
    else:
        click.echo("no stream" if stream_id is None and name is None else "no such stream")


def _plain(stream: DiscoveredStream) -> dict[str, object]:
    """As JSON can hold it: a name may have bytes that are no text."""
    import msgspec

    fields: dict[str, object] = msgspec.to_builtins(stream)
    return fields | {"data_source_name": _text(stream.data_source_name)}


def _text(name: str | None) -> str | None:
    return None if name is None else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _print_table(streams: list[DiscoveredStream]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "stream", "tags", "producer", "epoch", "slots", "largest", "driver"):
        is_number = heading in ("stream", "producer", "epoch", "slots", "largest")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for stream in streams:
        largest = max((pool.stride_bytes for pool in stream.payload_pools), default=0)
        table.add_row(
            Text(_text(stream.data_source_name) or "-"),
            str(stream.stream_id),
            Text(", ".join(stream.tags)),
            str(stream.producer_id or "-"),
            str(stream.epoch),
            str(stream.header_nslots),
            _size(largest),
            Text(stream.driver_instance_id),
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes} B"
