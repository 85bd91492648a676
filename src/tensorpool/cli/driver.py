# SPDX-License-Identifier: Apache-2.0
"""`tensorpool driver`: the SHM driver as a service, until SIGTERM, Ctrl-C or an authorised shutdown request."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

import click
import msgspec

from tensorpool import logs, shm
from tensorpool.cli.options import aeron_dir_option, config_option, load_config, service_options, set_option
from tensorpool.cli.signals import StopSignals
from tensorpool.driver import Driver, DriverConfig
from tensorpool.logs import get_logger

FORCE_AFTER_S: Final = 3.0  # beyond the shutdown timeout: removing gigabytes takes a moment


@click.command(name="driver")
@config_option("A TOML file; the built-in defaults without.")
@aeron_dir_option("driver.aeron_dir")
@set_option()
@service_options(check="print the memory bill", json="With --check: the bill and every setting in effect as JSON.")
def command(
    path: Path | None,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    check: bool,
    as_json: bool,
    log_level: str,
) -> None:
    """Run the SHM driver: it owns the memory, grants leases and announces streams.

    Embeds a media driver unless one is alive at the Aeron directory. SIGTERM and Ctrl-C drain: clients are told, memory
    is removed; a second signal ends at once.
    """
    config = load_config(path, settings)
    if check:
        _print_bill(config, as_json=as_json)
        return
    logs.configure(log_level)
    stop = StopSignals()
    with Driver(config, aeron_dir=aeron_dir) as driver:
        click.echo(f"driver {config.driver.instance_id} serves {driver.aeron_dir}")
        while driver.is_running and stop.count < 2:
            if stop.wait(0.1) and stop.count == 1:
                _end_in_time(driver, config.shutdown_timeout_ns / 1e9 + FORCE_AFTER_S)
                driver.shut_down(text=f"{stop.name} received")


def _end_in_time(driver: Driver, seconds: float) -> None:
    """End the process when it has not ended by then, such as in a call to a media driver that does not answer."""

    def force() -> None:
        time.sleep(seconds)
        get_logger("driver").error("end_forced", after_s=seconds)
        driver.abandon()
        os._exit(1)

    threading.Thread(target=force, name="end", daemon=True).start()


def _print_bill(config: DriverConfig, *, as_json: bool) -> None:
    """What the configuration takes at most, and what the mount has."""
    bill = config.bill()
    mount = shm.mount_space(config.shm.base_dir)
    if as_json:
        lines = [
            {**msgspec.structs.asdict(line), "total_bytes": line.total_bytes}  # a property is not a field
            for line in bill.lines
        ]
        total = {"total_bytes": bill.total_bytes, "base_dir": config.shm.base_dir, "free_bytes": mount.free_bytes}
        click.echo(msgspec.json.encode({"streams": lines, **total, "settings": config.dump()}))
        return
    click.echo(
        f"{'stream':<24} {'id':>10}  {'profile':<16} {'per epoch':>10} {'epochs':>6} {'streams':>7} {'at most':>10}"
    )
    for line in bill.lines:
        number = "-" if line.stream_id is None else str(line.stream_id)
        click.echo(
            f"{line.name:<24} {number:>10}  {line.profile:<16} {_size(line.epoch_bytes):>10} {line.epochs or 'all':>6} "
            f"{line.streams:>7} {_size(line.total_bytes):>10}"
        )
    click.echo(f"together at most {_size(bill.total_bytes)}; {mount.mount_point} has {_size(mount.free_bytes)} free")
    if mount.free_bytes is not None and bill.epoch_bytes > mount.free_bytes:
        click.echo(
            f"warning: the configured streams need {_size(bill.epoch_bytes)} for one epoch each; enlarge the mount "
            "(a container: --shm-size) or use fewer or smaller slots"
        )


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "no limit"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"
