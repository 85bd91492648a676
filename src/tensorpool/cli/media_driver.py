# SPDX-License-Identifier: Apache-2.0
"""`tensorpool media-driver`: runs Aeron's C media driver with our defaults, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tensorpool import aeron, logs
from tensorpool.aeron.media_driver import parse_setting
from tensorpool.cli import options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, monitoring_options
from tensorpool.cli.signals import StopSignals
from tensorpool.driver import DriverConfig
from tensorpool.telemetry.health import STILL_NS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BEAT_S: Final = 0.5


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
@monitoring_options
def command(path: Path | None, aeron_dir: str | None, settings: tuple[str, ...], monitoring: Monitoring) -> None:
    """Run an Aeron media driver on its own.

    `tensorpool driver` and `tensorpool demo` start one themselves; use this where several programs share one.
    """
    config = DriverConfig.load(path)
    where = aeron_dir or config.driver.aeron_dir or None
    stop = StopSignals()
    with aeron.MediaDriver(where, config.aeron_access(), **dict(parse_setting(text) for text in settings)) as driver:
        logs.say(f"media driver at {driver.aeron_dir}")
        with _process(driver.aeron_dir, monitoring) as process:
            process.ready(f"at {driver.aeron_dir}")
            while not stop.wait(BEAT_S):
                process.beat()


def _process(aeron_dir: str, monitoring: Monitoring) -> ServiceProcess:
    """Its duty cycle is Aeron's: the heartbeat in the directory shows that it turns."""

    def collect() -> Iterator[Metric]:
        from tensorpool.telemetry.metrics import space_metrics

        return space_metrics(aeron=aeron_dir)

    def silent_ns() -> int:
        return 0 if aeron.is_driver_active(aeron_dir, timeout_ms=STILL_NS // 1_000_000) else STILL_NS + 1

    return ServiceProcess(
        "media-driver", aeron_dir, monitoring, silent_ns=silent_ns, collect=collect, aeron_dir=aeron_dir
    )
