# SPDX-License-Identifier: Apache-2.0
"""`tensorpool media-driver`: runs Aeron's C media driver with our defaults, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import click

from tensorpool import aeron
from tensorpool.aeron.media_driver import parse_setting
from tensorpool.cli.signals import StopSignals


@click.command(name="media-driver")
@click.option("--aeron-dir", help="Its directory.  [default: AERON_DIR, Aeron's own]")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of the C media driver; may be repeated.",
)
def command(aeron_dir: str | None, settings: tuple[str, ...]) -> None:
    """Run an Aeron media driver on its own.

    `tensorpool driver` and `tensorpool demo` start one themselves; use this where several programs share one.
    """
    stop = StopSignals()
    with aeron.MediaDriver(aeron_dir, **dict(parse_setting(text) for text in settings)) as driver:
        click.echo(f"media driver at {driver.aeron_dir}")
        while not stop.wait(60):
            pass
