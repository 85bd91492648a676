# SPDX-License-Identifier: Apache-2.0
"""`tensorpool bridge`: carries streams to and from other hosts over UDP, until SIGTERM or Ctrl-C. Bridge §2, §10."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tensorpool import logs
from tensorpool.bridge.checksum import read_key
from tensorpool.bridge.config import BridgeConfig
from tensorpool.cli import options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, monitoring_options
from tensorpool.cli.signals import StopSignals

if TYPE_CHECKING:
    from tensorpool.bridge.bridge import Bridge


@click.command(name="bridge")
@options.config_option("A TOML file: docs/bridge.md.", is_required=True)
@options.aeron_dir_option("bridge.aeron_dir")
@options.set_option()
@monitoring_options
@options.service_options(json="Print JSON: with --check every setting, else one line per event.")
def command(
    path: Path,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    monitoring: Monitoring,
    check: bool,
    as_json: bool,
    log_level: str,
) -> None:
    """Run a bridge: it sends local streams to other hosts, and publishes streams of other hosts here.

    Waits until a media driver and an SHM driver run on this host.
    """
    config = BridgeConfig.load(path, overrides=options.overrides(settings))
    config.driver()
    read_key(config.bridge.mac_key_file)
    if check:
        options.print_settings(config.dump(), as_json=as_json, warnings=config.warnings())
        return
    from tensorpool.bridge.bridge import Bridge

    logs.configure(log_level)
    stop = StopSignals()
    bridge = Bridge(config, aeron_dir=aeron_dir)
    with _process(bridge, monitoring) as process, bridge.start():
        _report(config, "started", as_json=as_json)
        process.ready("waiting")
        is_ready = False
        while bridge.is_running and not stop.wait(0.1):
            process.beat()
            if bridge.is_ready is not is_ready:
                is_ready = bridge.is_ready
                destinations = bridge.destinations
                event = "ready" if is_ready else "waiting"
                _report(config, event, as_json=as_json, destinations=destinations)
                process.status(event)
        process.stopping()
        counters = bridge.counters
    _report(config, "stopped", as_json=as_json, counters=counters)


def _process(bridge: Bridge, monitoring: Monitoring) -> ServiceProcess:
    return ServiceProcess(
        "bridge",
        bridge.config.bridge.instance_id,
        monitoring,
        silent_ns=lambda: bridge.silent_ns,
        trouble=lambda: bridge.trouble,
        collect=bridge.collector.collect,
    )


def _report(config: BridgeConfig, event: str, *, as_json: bool, **fields: Any) -> None:
    instance_id = config.bridge.instance_id
    if as_json:
        line = msgspec.json.encode({"event": event, "instance_id": instance_id, **fields}).decode()
    else:
        line = f"bridge {instance_id}: {event}"
    logs.say(line)
