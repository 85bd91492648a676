# SPDX-License-Identifier: Apache-2.0
"""`tensorpool leases`: shows who is attached, and ends leases. Driver Model §4.4, §4.9."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from tensorpool.cli import format, options
from tensorpool.errors import ConfigError

if TYPE_CHECKING:
    from tensorpool.control.identification import LeaseFacts
    from tensorpool.driver import DriverConfig

NAMED_WITHIN_PERIODS: Final = 2.5  # of announces


@click.group(name="leases", invoke_without_command=True)
@click.option("--stream", metavar="STREAM", help="Only leases of this stream, a name or an id.")
@options.timeout_option(5.0, "How long to wait for the driver.", is_least_allowed=False)
@options.json_option("Print everything as one JSON array.")
@options.connection_options
def command(stream: str | None, timeout: float, as_json: bool, connection: options.Connection) -> None:
    """Show who is attached: each lease with its stream, its client and the process behind it.

    What the driver can see on its host is printed as it is; what only the client says of itself is marked "declared".
    Clients of other implementations say nothing: what the media driver knows of them is printed.
    """
    subcommand = click.get_current_context().invoked_subcommand
    if subcommand is not None:
        if stream is not None or as_json or connection != options.Connection(None, None, ()):
            raise click.UsageError(f"options belong behind {subcommand}")
        return
    from tensorpool.control.identification import LeaseQuery, driver_tag
    from tensorpool.diagnosis.leases import all_leases

    with options.commanding(connection) as (commander, config):
        stream_id = None if stream is None else _stream_id(connection, config, stream, timeout)
        found = all_leases(commander, driver_tag(config.driver.control), LeaseQuery(stream_id=stream_id), timeout)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found))
    elif found:
        _print_table(found)
    else:
        click.echo("no lease" if stream is None else f"no lease of {stream}")


@command.command(name="revoke")
@click.argument("lease", type=click.IntRange(min=0), required=False)
@click.option(
    "--client", "client_id", type=click.IntRange(1, 2**32 - 2), metavar="ID", help="The lease of this client."
)
@click.option("--stream", metavar="STREAM", help="All leases of this stream, a name or an id.")
@click.option("--reason", default="", metavar="TEXT", help="What the clients and the audit log get to read.")
@options.timeout_option(5.0, "How long to wait for the driver.", is_least_allowed=False)
@options.connection_options
def revoke(
    lease: int | None,
    client_id: int | None,
    stream: str | None,
    reason: str,
    timeout: float,
    connection: options.Connection,
) -> None:
    """End LEASE, the lease of a client, or all leases of a stream.

    A client whose lease ends loses its memory at once; one of tensorpool asks for another lease, as the specification
    has it: end its process if it is to stay away. Only the account that runs the driver may do this, or who has its
    control.token_file.
    """
    if [lease, client_id, stream].count(None) != 2:
        raise click.UsageError("give a LEASE, or --client, or --stream: one of them")
    import msgspec

    from tensorpool.control.identification import REVOKE, LeaseQuery, driver_tag

    with options.commanding(connection) as (commander, config):
        stream_id = None if stream is None else _stream_id(connection, config, stream, timeout)
        query = LeaseQuery(lease_id=lease, client_id=client_id, stream_id=stream_id, reason=reason)
        text = msgspec.json.encode(query).decode()
        outcome = commander.send(driver_tag(config.driver.control), REVOKE, text, timeout=timeout)
    for line in str(outcome.value).splitlines():
        click.echo(format.printable(line))


def _stream_id(connection: options.Connection, config: DriverConfig, stream: str, timeout: float) -> int:
    """The id of a stream that the user named. Raises ConfigError."""
    wanted = options.stream_reference(stream)
    if isinstance(wanted, int):
        return wanted
    if wanted in config.streams:
        return config.streams[wanted].stream_id
    from tensorpool.client.client import connect

    # A stream whose producer has just attached again has no name for a moment.
    deadline_s = time.monotonic() + min(timeout, NAMED_WITHIN_PERIODS * config.announce_period_ns / 1e9)
    with connect(connection.aeron_dir, config=config) as client:
        found = {known.stream_id for known in client.discover(wanted, timeout=timeout)}
        while not found and time.monotonic() < deadline_s:
            time.sleep(0.05)
            found = {known.stream_id for known in client.discover(wanted, timeout=timeout)}
    if len(found) != 1:
        ids = ", ".join(map(str, sorted(found)))
        accepted = f"one of the streams {ids}: several have that name" if found else "a stream of `tensorpool ls`"
        raise ConfigError("--stream", stream, accepted)
    return found.pop()


def _print_table(leases: list[LeaseFacts]) -> None:
    from rich.text import Text

    headings = ("stream", "role", "pid", "user", "command", "host", "known", "since", "keepalive", "client", "lease")
    table = format.table(*headings, left=["stream", "role", "user", "command", "host", "known"])
    for facts in sorted(leases, key=lambda it: (it.stream_id, it.role != "PRODUCER", it.lease_id)):
        host = f"{facts.host} ({facts.place})" if facts.place else facts.host
        table.add_row(
            Text(format.stream(facts.stream_id, facts.stream_name or None)),
            facts.role.lower(),
            format.integer(facts.pid),
            Text(facts.user or format.NOTHING),
            Text(facts.command or facts.aeron_client or format.NOTHING),
            Text(host or format.NOTHING),
            facts.source,
            format.since(facts.since_ns),
            f"{format.age(max(facts.keepalive_age_ms, 0) / 1e3)} ago",
            str(facts.client_id),
            str(facts.lease_id),
        )
    console = format.console()
    if not console.is_terminal:
        console.width = 400  # nothing is cut off
    console.print(table)
