# SPDX-License-Identifier: Apache-2.0
"""`tensorpool bridge`: carries streams to and from other hosts over UDP, until SIGTERM or Ctrl-C. Bridge §2, §10."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tensorpool import logs
from tensorpool.bridge.checksum import read_key
from tensorpool.bridge.config import BridgeConfig
from tensorpool.cli import options
from tensorpool.cli.signals import StopSignals
from tensorpool.errors import ConfigError

if TYPE_CHECKING:
    from tensorpool.bridge.bridge import Bridge


@click.command(name="bridge")
@options.config_option("A TOML file: docs/bridge.md.", is_required=True)
@options.aeron_dir_option("bridge.aeron_dir")
@options.set_option()
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics at this address; :PORT is 127.0.0.1.")
@options.service_options(json="Print JSON: with --check every setting, else one line per event.")
def command(
    path: Path,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    metrics: str | None,
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
    with ExitStack() as stack:
        bridge = Bridge(config, aeron_dir=aeron_dir)
        if metrics is not None:
            stack.callback(_serve_metrics(metrics, bridge))
        stack.enter_context(bridge.start())
        _report(config, "started", as_json=as_json)
        is_ready = False
        while bridge.is_running and not stop.wait(0.1):
            if bridge.is_ready is not is_ready:
                is_ready = bridge.is_ready
                destinations = bridge.destinations
                _report(config, "ready" if is_ready else "waiting", as_json=as_json, destinations=destinations)
        counters = bridge.counters
    _report(config, "stopped", as_json=as_json, counters=counters)


def _report(config: BridgeConfig, event: str, *, as_json: bool, **fields: Any) -> None:
    instance_id = config.bridge.instance_id
    if as_json:
        line = msgspec.json.encode({"event": event, "instance_id": instance_id, **fields}).decode()
    else:
        line = f"bridge {instance_id}: {event}"
    click.echo(line)


def _serve_metrics(address: str, bridge: Bridge) -> Any:
    """Returns a function that stops the server."""
    from prometheus_client import CollectorRegistry, start_http_server

    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65_536:
        raise ConfigError("--metrics", address, "HOST:PORT, or :PORT for 127.0.0.1")
    registry = CollectorRegistry()
    registry.register(bridge.collector)
    try:
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError("--metrics", address, f"an address to listen at; {error.strerror}") from None

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
