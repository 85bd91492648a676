# SPDX-License-Identifier: Apache-2.0
"""`tensorpool discovery`: a registry that answers for many drivers, until SIGTERM or Ctrl-C. Discovery §8."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from tensorpool import logs
from tensorpool.cli.options import overrides
from tensorpool.cli.signals import StopSignals
from tensorpool.discovery.config import RegistryConfig


@click.command(name="discovery")
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="A TOML file: docs/discovery.md."
)
@click.option(
    "--aeron-dir", help="The media driver's directory.  [default: discovery.aeron_dir, AERON_DIR, Aeron's own]"
)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="A key of the configuration; over file and environment.",
)
@click.option("--check", is_flag=True, help="Validate the configuration, print it, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --check: every setting in effect as JSON.")
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
def command(
    path: Path, aeron_dir: str | None, settings: tuple[str, ...], check: bool, as_json: bool, log_level: str
) -> None:
    """Run a registry: it listens to the announces of many drivers and answers which streams there are.

    Embeds a media driver unless one is alive at the Aeron directory.
    """
    config = RegistryConfig.load(path, overrides=overrides(settings))
    section = config.discovery
    if check:
        _print_settings(config, as_json=as_json)
        return
    from tensorpool.discovery.registry import Registry

    logs.configure(log_level)
    stop = StopSignals()
    with Registry(config, aeron_dir=aeron_dir) as registry:
        drivers = len(section.drivers)
        click.echo(f"registry answers at {section.channel} stream {section.stream_id}, for {drivers} drivers")
        while registry.is_running and not stop.wait(0.5):
            pass


def _print_settings(config: RegistryConfig, *, as_json: bool) -> None:
    values = config.dump()
    if as_json:
        click.echo(msgspec.json.encode({"settings": values}))
        return
    for key, value in values.items():
        click.echo(f"{key} = {msgspec.json.encode(value).decode()}")
