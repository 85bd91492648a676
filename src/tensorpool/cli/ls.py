# SPDX-License-Identifier: Apache-2.0
"""`tensorpool ls`: lists the streams that discovery knows. Discovery §5, §7."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorpool.cli import format, options

if TYPE_CHECKING:
    from tensorpool.client.discovery_query import DiscoveredStream


@click.command(name="ls")
@click.option("--name", metavar="NAME", help="Only streams with exactly this name.")
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Only streams with this tag; given twice, with both.")
@click.option(
    "--producer",
    "producer_id",
    type=click.IntRange(0, 2**32 - 2),
    metavar="ID",
    help="Only streams of this producer; 0: streams without a producer.",
)
@click.option("--stream", "stream_id", type=click.IntRange(1, 2**32 - 2), metavar="ID", help="Only this stream.")
@click.option("--driver", "driver_instance_id", metavar="INSTANCE", help="Only streams of this driver.")
@options.timeout_option(2.0, "How long to wait for answers.", is_least_allowed=False)
@options.json_option("Print everything as one JSON array.")
@options.connection_options
def command(
    name: str | None,
    tags: tuple[str, ...],
    producer_id: int | None,
    stream_id: int | None,
    driver_instance_id: str | None,
    timeout: float,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """List the streams of this host's driver, and those of all registries that are configured.

    A stream is listed when it matches every filter.
    """
    from tensorpool.client.client import connect

    with connect(connection.aeron_dir, config=connection.load()) as client:
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
    """As JSON can hold it."""
    import msgspec

    fields: dict[str, object] = msgspec.to_builtins(stream)
    return fields | {"data_source_name": format.decodable(stream.data_source_name)}


def _print_table(streams: list[DiscoveredStream]) -> None:
    from rich.text import Text

    headings = ("name", "stream", "tags", "producer", "epoch", "slots", "largest frame", "driver")
    table = format.table(*headings, left=["name", "tags", "driver"])
    for stream in streams:
        largest = max((pool.stride_bytes for pool in stream.payload_pools), default=0)
        table.add_row(
            Text(format.decodable(stream.data_source_name) or "-"),
            str(stream.stream_id),
            Text(", ".join(stream.tags)),
            str(stream.producer_id or "-"),
            str(stream.epoch),
            str(stream.header_nslots),
            format.size(largest),
            Text(stream.driver_instance_id),
        )
    format.show(table)
