# SPDX-License-Identifier: Apache-2.0
"""`tensorpool drain` and `tensorpool reload`: commands to a running service, of the account that runs it."""

from __future__ import annotations

import click

from tensorpool.cli import format, options


@click.command(name="drain")
@click.argument("service", required=False)
@click.option("--reason", default="", metavar="TEXT", help="Why, for the service's log.")
@options.timeout_option(5.0, "How long to wait for the answer.", is_least_allowed=False)
@options.connection_options
def drain(service: str | None, reason: str, timeout: float, connection: options.Connection) -> None:
    """End SERVICE in order, as SIGTERM would; without SERVICE the driver.

    SERVICE is its tag as `tensorpool top` shows it, such as service:recorder:lab1, with or without "service:". Only the
    account that runs the service may do this, or who has its control.token_file.
    """
    _send(connection, service, "drain", reason or None, timeout)


@click.command(name="reload")
@click.argument("service", required=False)
@options.timeout_option(5.0, "How long to wait for the answer.", is_least_allowed=False)
@options.connection_options
def reload(service: str | None, timeout: float, connection: options.Connection) -> None:
    """Have SERVICE read its configuration again, as SIGHUP would; without SERVICE the driver. Prints what differs.

    SERVICE is its tag as `tensorpool top` shows it, such as service:discovery:r1, with or without "service:". Only the
    account that runs the service may do this, or who has its control.token_file.
    """
    _send(connection, service, "reload", None, timeout)


def _send(connection: options.Connection, service: str | None, key: str, value: str | None, timeout: float) -> None:
    from tensorpool.control.identification import driver_tag

    with options.commanding(connection) as (commander, config):
        tag = driver_tag(config.driver.control) if service is None else f"service:{service.removeprefix('service:')}"
        outcome = commander.send(tag, key, value, timeout=timeout)
    for line in str(outcome.value).splitlines():
        click.echo(format.printable(line))
