# SPDX-License-Identifier: Apache-2.0
"""`tensorpool supervisor`: observes everything and serves it as JSON and Prometheus, until SIGTERM or Ctrl-C.

Wire §10.5.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool import logs
from tensorpool.cli import options
from tensorpool.cli.service_process import Monitoring, ServiceProcess
from tensorpool.cli.signals import StopSignals

if TYPE_CHECKING:
    from tensorpool.supervisor.snapshot import Change
    from tensorpool.supervisor.supervisor import Supervisor

POLL_S: Final = 0.1


@click.command(name="supervisor")
@options.config_option("A TOML file, which may be the driver's: docs/supervisor.md.")
@click.option("--http", "http", metavar="HOST:PORT", help='Address to serve at; "": none.  [default: 127.0.0.1:9464]')
@options.aeron_dir_option()
@options.set_option()
@options.service_options(json="Print a line of JSON when it is ready, and one for each change.")
def command(
    path: Path | None,
    http: str | None,
    aeron_dir: str | None,
    settings: tuple[str, ...],
    check: bool,
    as_json: bool,
    log_level: str,
) -> None:
    """Observe all streams, consumers and services, limit consumers that lag by configured rules, and serve the view.

    Serves /view (JSON), /metrics (Prometheus) and /healthz on a loopback address. Waits for a media driver that is not
    running yet.
    """
    from tensorpool.supervisor.config import SupervisorConfig

    flags = options.overrides(settings) | ({} if http is None else {"supervisor.http": http})
    config = SupervisorConfig.load(path, overrides=flags)
    if check:
        options.print_settings(config.dump(), as_json=as_json)
        return
    from tensorpool.supervisor.supervisor import Supervisor

    logs.configure(log_level)
    stop = StopSignals()
    changes: deque[tuple[Change, int]] = deque(maxlen=config.supervisor.max_changes)
    on_change = (lambda *change: changes.append(change)) if as_json else None
    with Supervisor(config, aeron_dir=aeron_dir, on_change=on_change) as supervisor, _process(supervisor) as process:
        where, name = supervisor.http_address, config.supervisor.instance_id
        if as_json:
            ready = {"event": "ready", "instance_id": name, "http": where, "aeron_dir": supervisor.observer.aeron_dir}
            logs.say(msgspec.json.encode(ready).decode())
        else:
            served = f"http://{where}/view /metrics /healthz" if where else "no HTTP"
            logs.say(f"supervisor {name}: ready, {served}, observes {supervisor.observer.aeron_dir}")
        process.ready(f"observes {supervisor.observer.aeron_dir}")
        while supervisor.is_running and not stop.wait(POLL_S):
            process.beat()
            while changes:  # in this thread: a blocked standard output does not block the supervisor
                _print_change(*changes.popleft())


def _process(supervisor: Supervisor) -> ServiceProcess:
    """For systemd; its HTTP is the supervisor's own, which serves the view too."""
    observer, name = supervisor.observer, supervisor.config.supervisor.instance_id
    silent_ns = lambda: observer.clock.monotonic_ns() - observer.turned_ns  # noqa: E731
    return ServiceProcess("supervisor", name, Monitoring(), silent_ns=silent_ns)


def _print_change(change: Change, time_ns: int) -> None:
    fields = {"event": "change", "time_ns": time_ns} | msgspec.structs.asdict(change)
    del fields["at_ns"]
    logs.say(msgspec.json.encode(fields).decode())
