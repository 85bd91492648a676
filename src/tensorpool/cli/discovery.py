# SPDX-License-Identifier: Apache-2.0
"""`tensorpool discovery`: runs a registry that answers for many drivers, until SIGTERM or Ctrl-C. Discovery §8."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from tensorpool import logs
from tensorpool.cli import options
from tensorpool.cli.signals import StopSignals
from tensorpool.discovery.config import RegistryConfig


@click.command(name="discovery")
@options.config_option("A TOML file: docs/discovery.md.", is_required=True)
@options.aeron_dir_option("discovery.aeron_dir")
@options.set_option()
@options.service_options(json="With --check: every setting in effect as JSON.")
def command(
    path: Path, aeron_dir: str | None, settings: tuple[str, ...], check: bool, as_json: bool, log_level: str
) -> None:
    """Run a registry: it follows the announces of many drivers and answers queries about their streams.

    Starts a media driver of its own unless one is running at the Aeron directory. At SIGHUP it reads the file again and
    follows the drivers that it names then.
    """
    load = functools.partial(RegistryConfig.load, path, overrides=options.overrides(settings))
    config = load()
    section = config.discovery
    if check:
        options.print_settings(config.dump(), as_json=as_json)
        return
    from tensorpool.discovery.registry import Registry

    logs.configure(log_level)
    stop = StopSignals(hangup=True)
    with Registry(config, aeron_dir=aeron_dir, load=load) as registry:
        drivers = len(section.drivers)
        click.echo(f"registry answers at {section.channel} stream {section.stream_id}, for {drivers} drivers")
        while registry.is_running and not stop.count:
            stop.wait(0.5)
            if stop.take_hangup():
                options.print_reload(registry.reload)
