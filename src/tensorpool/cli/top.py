# SPDX-License-Identifier: Apache-2.0
"""`tensorpool top`: shows all streams, consumers and services, and which of them lag.

Subscribes to the public streams itself, so no supervisor needs to run; takes no lease and changes nothing. Wire §10.5.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click

from tensorpool.cli import format, options
from tensorpool.cli.keyboard import keyboard
from tensorpool.cli.signals import StopSignals

if TYPE_CHECKING:
    from tensorpool.supervisor.config import SupervisorConfig
    from tensorpool.supervisor.observer import Observer
    from tensorpool.supervisor.snapshot import Snapshot

ANNOUNCES: Final = 2.2  # periods to listen before a single page: every announce and report arrives twice,
HEARTBEATS: Final = 1.2  # and every heartbeat once
LOOK_S: Final = 0.1  # the longest time that a key waits


@click.command(name="top")
@click.option("--once", is_flag=True, help="Print one page and end; the default without a terminal.")
@options.json_option("Print a line of JSON for each page.")
@options.seconds_option("End after S seconds; with --once, listen for S seconds.")
@click.option(
    "--every",
    type=options.Number(min=0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Redraw every S seconds.",
)
@options.connection_options
def command(
    once: bool,
    as_json: bool,
    seconds: float | None,
    every: float,
    connection: options.Connection,
) -> None:
    """Show all streams, consumers and services, live: rates, epochs, ages, lag, drops, and what changed.

    Needs no supervisor, and shows producers and consumers of any implementation. Ends with q or Ctrl-C.
    """
    from tensorpool.supervisor.config import SupervisorConfig
    from tensorpool.supervisor.observer import Observer

    config = SupervisorConfig.of(connection.load())
    stop = StopSignals()
    with Observer(connection.aeron_dir, config) as observer:
        if once or not (as_json or sys.stdout.isatty()):
            stop.wait(seconds or _listening_s(config))
            _print_page(observer, as_json=as_json)
            return
        deadline = time.monotonic() + seconds if seconds else float("inf")
        if as_json:
            while not stop.count and time.monotonic() < deadline:
                stop.wait(min(every, deadline - time.monotonic()))
                _print_page(observer, as_json=True)
        else:
            _run(observer, every, deadline, stop)


def _listening_s(config: SupervisorConfig) -> float:
    """Until every running process has announced, reported or sent a heartbeat."""
    return max(ANNOUNCES * config.announce_period_ns / 1e9, HEARTBEATS * config.control.alive_period_ms / 1e3)


def _print_page(observer: Observer, *, as_json: bool) -> None:
    snapshot, wall_ns = observer.snapshot(), time.time_ns()
    if as_json:
        from tensorpool.supervisor.encoding import to_json

        click.echo(to_json(snapshot, wall_ns))
        return
    from tensorpool.cli.overview import Page, render

    console = format.console()
    notice = _notice(observer, snapshot)
    page = Page(aeron_dir=observer.aeron_dir, wall_ns=wall_ns, width=console.width, notice=notice)
    console.print(render(snapshot, page))


def _run(observer: Observer, every: float, deadline: float, stop: StopSignals) -> None:
    """Redraw until the user presses q, a signal arrives or the time is over."""
    from rich.console import Console
    from rich.live import Live

    from tensorpool.cli.overview import Page, render

    console = Console()
    drawn, size = 0.0, console.size
    measured_at = time.monotonic() + _listening_s(observer.config)
    with (
        keyboard() as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while not stop.count and time.monotonic() < deadline:
            if time.monotonic() - drawn >= every or console.size != size:
                drawn, size = time.monotonic(), console.size
                snapshot = observer.snapshot()
                measuring = _measuring(observer) if drawn < measured_at else ""
                page = Page(
                    aeron_dir=observer.aeron_dir,
                    wall_ns=time.time_ns(),
                    width=size.width,
                    height=size.height,
                    notice="" if measuring else _notice(observer, snapshot),
                    measuring=measuring,
                )
                live.update(render(snapshot, page), refresh=True)
            if "q" in keys.read(LOOK_S):
                break


def _measuring(observer: Observer) -> str:
    return f"measuring: processes report every {observer.config.announce_period_ns / 1e9:g} s"


def _notice(observer: Observer, snapshot: Snapshot) -> str:
    """What is wrong with the Aeron directory itself."""
    if not observer.is_connected:
        return f"the media driver at {observer.aeron_dir} has ended; waiting for it"
    if snapshot.streams:
        return ""
    if any(service.service == "driver" for service in snapshot.services):
        return "no stream yet: start a producer (`tensorpool produce NAME`)"
    return (
        "no stream is announced here. Is an SHM driver (`tensorpool driver`) running at this Aeron directory? "
        "`tensorpool doctor` finds out more."
    )
