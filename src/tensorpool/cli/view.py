# SPDX-License-Identifier: Apache-2.0
"""`tensorpool view`: shows one stream, in the browser, as an address where there is none, or in the terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from typing import Final

import click

from tensorpool import logs
from tensorpool.cli import options
from tensorpool.cli.console import record_options
from tensorpool.cli.signals import StopSignals

POLL_S: Final = 0.2


@click.command(name="view")
@click.argument("stream")
@click.option("--terminal", is_flag=True, help="Draw into the terminal, also over ssh; q ends it.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
@options.timeout_option(2.0, "How long to look for the stream.", is_least_allowed=False)
@options.seconds_option()
@options.connection_options
def command(
    stream: str,
    terminal: bool,
    no_browser: bool,
    timeout: float,
    seconds: float | None,
    connection: options.Connection,
) -> None:
    """Show STREAM, an id or a name, live: in the browser where there is one; otherwise the address is printed.

    It is the page of `tensorpool console`, served until Ctrl-C. Exit code 1: there is no such stream.
    """
    if terminal:
        _draw(stream, timeout, seconds, connection)
    else:
        _serve(stream, timeout, seconds, connection, may_open=not no_browser)


def has_browser() -> bool:
    """Whether there is a browser with a window: not over ssh without a display, and none that draws into terminals."""
    if not (sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def _serve(
    stream: str, timeout: float, seconds: float | None, connection: options.Connection, *, may_open: bool
) -> None:
    from tensorpool.console.server import Console, ConsoleOptions, missing_page

    config, stream_id = connection.load(), _find(stream, timeout, connection)
    logs.configure("warning")
    stop = StopSignals()
    with Console(config, connection.aeron_dir, ConsoleOptions(record_options=record_options(connection))) as console:
        fault, place = missing_page(), f"/streams/{stream_id}"
        if fault is not None:
            click.echo(f"warning: {fault}", err=True)
        opens = may_open and has_browser()
        click.echo(f"{'opening the browser; also at' if opens else 'open'} {console.url(place)}")
        if opens:  # on a thread: some browsers return when they are closed
            threading.Thread(target=webbrowser.open, args=(console.link(place),), daemon=True).start()
        end_s = time.monotonic() + seconds if seconds else float("inf")
        while console.is_running and time.monotonic() < end_s and not stop.wait(POLL_S):
            pass


def _draw(stream: str, timeout: float, seconds: float | None, connection: options.Connection) -> None:
    from tensorpool.cli.view_terminal import show
    from tensorpool.client.client import connect
    from tensorpool.looks import Look

    stop = StopSignals()
    with (
        connect(connection.aeron_dir, config=connection.load()) as client,
        client.consumer(options.stream_reference(stream), timeout=timeout) as consumer,
    ):
        show(consumer, Look(), stop, seconds)


def _find(stream: str, timeout: float, connection: options.Connection) -> int:
    """The id of a stream. Raises TensorPoolError with those that there are."""
    from tensorpool.client.client import connect
    from tensorpool.diagnosis.announced_streams import observing
    from tensorpool.diagnosis.streams import Wanted, find_stream

    config, wanted = connection.load(), Wanted(stream)
    with connect(connection.aeron_dir, config=config) as client, observing(config, client.aeron_dir) as observer:
        return find_stream(wanted, client, observer, timeout=timeout)[0].stream_id
