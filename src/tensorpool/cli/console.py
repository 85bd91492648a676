# SPDX-License-Identifier: Apache-2.0
"""`tensorpool console`: serves the console's page until SIGTERM or Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool import logs
from tensorpool.cli import options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, monitoring_options
from tensorpool.cli.signals import StopSignals

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tensorpool.console.server import Console

POLL_S: Final = 0.2


@click.command(name="console")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Where to serve. An address that other hosts reach needs --token-file.",
)
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, metavar="PORT", help="0: any that is free.  [default: 0]"
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with the token that opens the page.  [default: a new one at each start]",
)
@click.option(
    "--supervisor",
    metavar="URL",
    help="Show the view of a running supervisor, such as http://127.0.0.1:9464.  [default: observe here]",
)
@click.option(
    "--lake", "lakes", multiple=True, metavar="PATH", help="A lake to show and to record to; may be repeated."
)
@options.json_option("Print a line of JSON when it is ready.")
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="warning", show_default=True)
@monitoring_options
@options.connection_options
def command(
    listen: str,
    port: int,
    token_file: Path | None,
    supervisor: str | None,
    lakes: tuple[str, ...],
    as_json: bool,
    log_level: str,
    monitoring: Monitoring,
    connection: options.Connection,
) -> None:
    """Serve a page that shows streams with live pictures, recordings, services and this host.

    Prints the address to open in a browser: it carries the token, without which nothing is answered. Producers and
    consumers do not wait for it. Ends with Ctrl-C, and ends recordings that were started in the page.
    """
    config = connection.load()
    from tensorpool.console.server import Console, ConsoleOptions, missing_page

    chosen = ConsoleOptions(
        listen=listen,
        port=port,
        token_file=token_file,
        supervisor=supervisor,
        lakes=lakes,
        record_options=record_options(connection),
    )
    logs.configure(log_level)
    stop = StopSignals()
    with Console(config, connection.aeron_dir, chosen) as console, _process(console, monitoring) as process:
        fault = missing_page()
        if as_json:
            ready = {"event": "ready", "url": console.url(), "address": console.address}
            logs.say(msgspec.json.encode(ready).decode())
        else:
            logs.say(f"console: {console.url()}")
        if fault is not None:
            logs.say(f"warning: {fault}", err=True)
        process.ready(f"at {console.address}")
        while console.is_running and not stop.wait(POLL_S):
            process.beat()


def _process(console: Console, monitoring: Monitoring) -> ServiceProcess:
    def collect() -> Iterator[Metric]:
        from tensorpool.telemetry.metrics import gauge

        yield gauge("tensorpool_console_previews", "Streams that pages watch.", console.watched_streams)

    return ServiceProcess(
        "console",
        console.address,
        monitoring,
        silent_ns=lambda: console.silent_ns,
        trouble=lambda: console.trouble,
        collect=collect,
    )


def record_options(connection: options.Connection) -> tuple[str, ...]:
    """The options with which a recorder that a page starts finds the same driver."""
    found = [] if connection.aeron_dir is None else ["--aeron-dir", connection.aeron_dir]
    found += [] if connection.path is None else ["--config", str(connection.path)]
    return (*found, *(word for setting in connection.settings for word in ("--set", setting)))
