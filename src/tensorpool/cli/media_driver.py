# SPDX-License-Identifier: Apache-2.0
"""`tensorpool media-driver`: runs Aeron's C media driver with our defaults, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import click

from tensorpool import aeron
from tensorpool.aeron.media_driver import parse_setting
from tensorpool.cli import options
from tensorpool.cli.signals import StopSignals
from tensorpool.driver import DriverConfig


@click.command(name="media-driver")
@options.config_option("The driver's TOML file, for its aeron_dir, shm.group and shm.permissions_mode.")
@options.aeron_dir_option("driver.aeron_dir")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of the C media driver; may be repeated.",
)
def command(path: Path | None, aeron_dir: str | None, settings: tuple[str, ...]) -> None:
    """Run an Aeron media driver on its own.

    `tensorpool driver` and `tensorpool demo` start one themselves; use this where several programs share one.
    """
    config = DriverConfig.load(path)
    where = aeron_dir or config.driver.aeron_dir or None
    stop = StopSignals()
    with aeron.MediaDriver(where, config.aeron_access(), **dict(parse_setting(text) for text in settings)) as driver:
        click.echo(f"media driver at {driver.aeron_dir}")
        while not stop.wait(60):
            pass
