# SPDX-License-Identifier: Apache-2.0
"""`tensorpool discovery`: runs a registry that answers for many drivers, until SIGTERM or Ctrl-C. Discovery §8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorpool import logs
from tensorpool.cli import options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, missing_media_driver, monitoring_options
from tensorpool.cli.signals import StopSignals
from tensorpool.discovery.config import RegistryConfig

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tensorpool.discovery.registry import Registry


@click.command(name="discovery")
@options.config_option("A TOML file: docs/discovery.md.", is_required=True)
@options.aeron_dir_option("discovery.aeron_dir")
@options.set_option()
@monitoring_options
@options.service_options(json="With --check: every setting in effect as JSON.")
def command(
    path: Path,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    monitoring: Monitoring,
    check: bool,
    as_json: bool,
    log_level: str,
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
    with Registry(config, aeron_dir=aeron_dir, load=load) as registry, _process(registry, monitoring) as process:
        drivers = len(section.drivers)
        logs.say(f"registry answers at {section.channel} stream {section.stream_id}, for {drivers} drivers")
        process.ready(f"answers for {drivers} drivers")
        while registry.is_running and not stop.count:
            stop.wait(0.5)
            process.beat()
            if stop.take_hangup():
                with process.reloading():
                    options.print_reload(registry.reload)


def _process(registry: Registry, monitoring: Monitoring) -> ServiceProcess:
    def collect() -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        from tensorpool.telemetry.metrics import gauge

        provider = registry.provider
        yield gauge("tensorpool_registry_drivers", "Drivers that it follows.", len(registry.config.discovery.drivers))
        yield gauge("tensorpool_registry_streams", "Streams that it knows.", provider.size)
        events = CounterMetricFamily("tensorpool_registry_events", "What it counted, by kind.", labels=["kind"])
        for kind, count in sorted(dict(provider.counts).items()):
            events.add_metric([str(kind)], count)
        yield events

    return ServiceProcess(
        "discovery",
        registry.config.discovery.instance_id,
        monitoring,
        silent_ns=lambda: registry.silent_ns,
        trouble=lambda: missing_media_driver(registry.aeron_dir),
        collect=collect,
        aeron_dir=registry.aeron_dir if registry.embeds_media_driver else None,
    )
