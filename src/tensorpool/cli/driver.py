# SPDX-License-Identifier: Apache-2.0
"""`tensorpool driver`: runs the SHM driver, until SIGTERM, Ctrl-C or an authorised shutdown request."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool import logs, shm
from tensorpool._core import last_level_cache_bytes
from tensorpool.cli import format, options
from tensorpool.cli.service_process import Monitoring, ServiceProcess, missing_media_driver, monitoring_options
from tensorpool.cli.signals import StopSignals
from tensorpool.diagnosis.check_result import Level
from tensorpool.diagnosis.space import check_space, shortage
from tensorpool.driver import Driver, DriverConfig
from tensorpool.driver.memory_bill import Bill
from tensorpool.logs import get_logger

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FORCE_AFTER_S: Final = 3.0  # after the shutdown timeout: removing gigabytes takes a moment


@click.command(name="driver")
@options.config_option("A TOML file.  [default: built-in defaults]")
@options.aeron_dir_option("driver.aeron_dir")
@options.set_option()
@monitoring_options
@options.service_options(
    check="print how much memory it takes", json="With --check: print memory and every setting in effect as JSON."
)
def command(
    path: Path | None,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    monitoring: Monitoring,
    check: bool,
    as_json: bool,
    log_level: str,
) -> None:
    """Run the SHM driver: it owns the memory, grants leases and announces streams.

    Starts a media driver of its own unless one is running at the Aeron directory. At SIGTERM or Ctrl-C it notifies
    clients, removes its memory and ends; a second signal ends it at once. At SIGHUP it reads the file again and adds,
    changes and retires streams, profiles, ranges and limits; what cannot change is printed, and then nothing changes.
    """
    load = functools.partial(DriverConfig.load, path, overrides=options.overrides(settings))
    config = load()
    if check:
        _print_bill(config, as_json=as_json)
        return
    logs.configure(log_level)
    if missing_space := shortage(config):
        logs.say(f"warning: {missing_space}", err=True)
    stop = StopSignals(hangup=True)
    with Driver(config, aeron_dir=aeron_dir, load=load) as driver, _process(driver, monitoring) as process:
        logs.say(f"driver {config.driver.instance_id} serves {driver.aeron_dir}")
        process.ready(f"serves {driver.aeron_dir}")
        is_ending = False
        while driver.is_running and stop.count < 2:
            stop.wait(0.1)
            process.beat()
            if stop.count == 1 and not is_ending:
                is_ending = True
                process.stopping()
                _end_in_time(driver, driver.config.shutdown_timeout_ns / 1e9 + FORCE_AFTER_S)
                driver.shut_down(text=f"{stop.name} received")
            elif stop.take_hangup():
                with process.reloading():
                    options.print_reload(driver.reload)


def _process(driver: Driver, monitoring: Monitoring) -> ServiceProcess:
    def collect() -> Iterator[Metric]:
        from tensorpool.driver.metrics import driver_metrics

        return driver_metrics(driver)

    return ServiceProcess(
        "driver",
        driver.config.driver.instance_id,
        monitoring,
        silent_ns=lambda: driver.silent_ns,
        trouble=lambda: missing_media_driver(driver.aeron_dir),
        collect=collect,
        aeron_dir=driver.aeron_dir if driver.embeds_media_driver else None,
    )


def _end_in_time(driver: Driver, seconds: float) -> None:
    """Force the process to end after `seconds`, such as when a call waits for a media driver that does not answer."""

    def force() -> None:
        time.sleep(seconds)
        get_logger("driver").error("end_forced", after_s=seconds)
        driver.abandon()
        logs.flush()
        os._exit(1)

    threading.Thread(target=force, name="end", daemon=True).start()


def _print_bill(config: DriverConfig, *, as_json: bool) -> None:
    """Print how much memory the configuration takes at most, and how much the mount has."""
    bill = config.bill()
    mount = shm.mount_space(config.shm.base_dir)
    if as_json:
        lines = [
            {**msgspec.structs.asdict(line), "total_bytes": line.total_bytes}  # a property is not a field
            for line in bill.lines
        ]
        cache = {"last_level_cache_bytes": last_level_cache_bytes()}
        total = {
            **cache,
            "total_bytes": bill.total_bytes,
            "base_dir": config.shm.base_dir,
            "free_bytes": mount.free_bytes,
        }
        click.echo(msgspec.json.encode({"streams": lines, **total, "settings": config.dump()}))
        return
    click.echo(
        f"{'stream':<24} {'id':>10}  {'profile':<16} {'per epoch':>10} {'epochs':>6} {'streams':>7} {'at most':>10}"
    )
    for line in bill.lines:
        number = "-" if line.stream_id is None else str(line.stream_id)
        click.echo(
            f"{line.name:<24} {number:>10}  {line.profile:<16} {_limit(line.epoch_bytes):>10} "
            f"{line.epochs or 'all':>6} {line.streams:>7} {_limit(line.total_bytes):>10}"
        )
    if config.policies.allow_dynamic_streams:
        click.echo(f"rings that clients ask for: {_limit(config.policies.max_provisioned_bytes)} more at most")
    click.echo(f"in total at most {_limit(bill.total_bytes)}; {mount.mount_point} has {_limit(mount.free_bytes)} free")
    _note_cache(bill)
    room = check_space(config)
    if room.level is not Level.OK:
        click.echo(f"warning: {room.found}; {room.remedy}")
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = config.policies.max_bytes or bill.total_bytes
    if most is None or most > min(machine_bytes, mount.free_bytes or machine_bytes):
        click.echo(
            f"note: this machine has {format.size(machine_bytes)} of memory; should all streams have producers, some "
            "would be refused: policies.max_bytes and policies.max_streams limit what clients can take"
        )


def _note_cache(bill: Bill) -> None:
    """Say which rings go round through memory instead of the cache."""
    cache_bytes = last_level_cache_bytes()
    names = [line.name for line in bill.lines if line.epoch_bytes > cache_bytes]
    if names:
        click.echo(
            f"note: rings beyond this machine's last-level cache ({format.size(cache_bytes)}): {', '.join(names)}: "
            "a slot has left the cache when its turn comes again, and reading or writing a frame takes about twice as "
            "long; where that matters more than how far a consumer may fall behind, use fewer slots (header_nslots)"
        )


def _limit(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else format.size(nbytes)
