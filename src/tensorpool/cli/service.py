# SPDX-License-Identifier: Apache-2.0
"""`tensorpool service`: writes systemd units, shows how the services are, and removes the units again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from tensorpool.cli import options, record, systemd_units
from tensorpool.cli.systemd_units import MARK, SERVICES, Installation
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError

DEFAULT: Final = ("driver", "supervisor")
ASK_S: Final = 5.0
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_]{0,30}|")
_PORT: Final = re.compile(r"(?:--metrics|--http) 127\.0\.0\.1:(\d+)")


class Place:
    """Where units and files for systemd-tmpfiles are, of one account or of the system."""

    def __init__(self, *, is_user: bool, root: Path) -> None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        base = config if is_user else Path("/etc")
        self.is_user = is_user
        self.units = _below(root, base / "systemd" / ("user" if is_user else "system"))
        self.tmpfiles = _below(root, base / ("user-tmpfiles.d" if is_user else "tmpfiles.d"))
        self.config_dir = base / "tensorpool"

    @property
    def systemctl(self) -> list[str]:
        return ["systemctl", *(["--user"] if self.is_user else [])]

    def installed(self, name: str) -> dict[str, Path]:
        """Our units by service."""
        paths = {service: self.units / systemd_units.unit_name(name, service) for service in SERVICES}
        return {service: path for service, path in paths.items() if path.exists() and _is_ours(path)}


def _place_options[F: Callable[..., None]](command: F) -> F:
    name = "Name of this installation, where a host has several."
    root = "Write below DIR instead of /: for packages and images."
    for option in (
        click.option("--root", type=click.Path(path_type=Path), default=Path("/"), metavar="DIR", help=root),
        click.option("--name", default="", metavar="NAME", callback=_check_name, help=name),
        click.option("--user/--system", "is_user", required=True, help="Units of your account, or of the system."),
    ):
        command = option(command)
    return command


def _check_name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r}: letters, digits and _, at most 31, such as imaging")
    return name


@click.group(name="service")
def command() -> None:
    """Run the services with systemd: units with readiness, a watchdog, and no more rights than they need."""


@command.command()
@click.argument("services", nargs=-1, type=click.Choice(SERVICES), metavar="[SERVICE]...")
@_place_options
@click.option(
    "--config-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where driver.toml, supervisor.toml, bridge.toml and registry.toml are.  [default: "
    "/etc/tensorpool[/NAME], or ~/.config/tensorpool[/NAME]]",
)
@click.option("--account", default="tensorpool", show_default=True, help="Who runs system units.")
@click.option("--group", default="", help="Their group.  [default: the account's own]")
@click.option(
    "--record",
    "recorded",
    default="",
    metavar="ARGS",
    help='Arguments of `tensorpool record`, such as "camera/front --to /srv/lake --direct --retain-age 7d".',
)
@click.option("--token-file", default="", metavar="FILE", help="The console's token.  [default: a new one each start]")
@click.option(
    "--first-port",
    type=click.IntRange(1024, 65_000),
    default=systemd_units.FIRST_PORT,
    show_default=True,
    help="Of the supervisor's HTTP; the metrics of the other services are at the next six, on 127.0.0.1.",
)
def install(
    services: tuple[str, ...],
    is_user: bool,
    name: str,
    root: Path,
    config_dir: Path | None,
    account: str,
    group: str,
    recorded: str,
    token_file: str,
    first_port: int,
) -> None:
    """Write units for SERVICE..., among media-driver, driver, registry, supervisor, bridge, recorder and console.

    Without SERVICE: driver and supervisor. Nothing is started: the commands that do so are printed.
    """
    place = Place(is_user=is_user, root=root)
    chosen = services or DEFAULT
    words = tuple(shlex.split(recorded))
    lake = _lake_of(words) if "recorder" in chosen else ""
    folder = (config_dir or place.config_dir / name).absolute()
    it = Installation(
        services=tuple(service for service in SERVICES if service in chosen),
        is_user=is_user,
        command=(sys.executable, "-m", "tensorpool"),
        config_dir=str(folder),
        name=name,
        account="" if is_user else account,
        group="" if is_user else group,
        first_port=first_port,
        record=words,
        lake=lake,
        token_file=str(Path(token_file).absolute()) if token_file else "",
        memory=_memory(_below(root, folder / "driver.toml")),
    )
    files = {place.units / it.unit_name(service): systemd_units.unit(it, service) for service in it.services}
    files[place.tmpfiles / systemd_units.tmpfiles_name(name)] = systemd_units.tmpfiles(it)
    for path in files:
        if path.exists() and not _is_ours(path):
            raise ConfigError("service install", str(path), "a file that `tensorpool service install` wrote; move it")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        click.echo(f"wrote {path}")
    _print_next(place, it, root)


@command.command()
@_place_options
@options.json_option()
def status(is_user: bool, name: str, root: Path, as_json: bool) -> None:
    """Show each installed service: systemd's state of its unit, and its own health.

    Exit code 1: one of them is not well, or none is installed.
    """
    place = Place(is_user=is_user, root=root)
    found = []
    for service, path in place.installed(name).items():
        port = _PORT.search(path.read_text())
        health = "unknown" if port is None else _health(int(port[1]))
        found.append({"service": service, "unit": path.name, "state": _state(place, path.name), "health": health})
    if as_json:
        click.echo(json.dumps(found))
    else:
        for row in found:
            click.echo(f"{row['unit']:<36} {row['state']:<12} {row['health']}")
        if not found:
            click.echo(f"no unit of ours in {place.units}: `tensorpool service install` writes them")
    if not found or any(row["health"] != "ok" for row in found):
        sys.exit(1)


@command.command()
@_place_options
def uninstall(is_user: bool, name: str, root: Path) -> None:
    """Remove the units that `install` wrote, and nothing else: configurations and lakes stay."""
    place = Place(is_user=is_user, root=root)
    paths = list(place.installed(name).values())
    running = [path.name for path in paths if _state(place, path.name) in ("active", "activating", "reloading")]
    if running:
        stop = " ".join([*place.systemctl, "disable", "--now", *running])
        raise ConfigError("service uninstall", ", ".join(running), f"units that do not run; `{stop}` first")
    tmpfiles = place.tmpfiles / systemd_units.tmpfiles_name(name)
    for path in [*paths, *([tmpfiles] if tmpfiles.exists() and _is_ours(tmpfiles) else [])]:
        path.unlink()
        click.echo(f"removed {path}")
    if not paths:
        click.echo(f"no unit of ours in {place.units}")


def _lake_of(words: tuple[str, ...]) -> str:
    """The lake of a `tensorpool record` with these arguments. Raises ConfigError, UsageError."""
    if not words:
        raise ConfigError("--record", "", 'what to record and where, such as "camera/front --to /srv/lake --direct"')
    parameters = record.command.make_context("record", list(words)).params
    lake = str(parameters["lake"])
    if "://" not in lake and not lake.startswith("/"):
        raise ConfigError("--record", lake, "an absolute path after --to: a unit has no current folder")
    return "" if "://" in lake else lake


def _memory(path: Path) -> tuple[str, ...]:
    """The folders that services map, by the driver's configuration where it exists already."""
    if not path.exists():
        return ()
    config = DriverConfig.load(path)
    return tuple(folder for folder in (config.shm.base_dir, config.driver.aeron_dir) if folder)


def _print_next(place: Place, it: Installation, root: Path) -> None:
    systemctl = " ".join(place.systemctl)
    if not place.is_user and root == Path("/"):
        import pwd

        try:
            pwd.getpwnam(it.account)
        except KeyError:
            create = f"useradd --system --create-home --home-dir /var/lib/{it.account} {it.account}"
            click.echo(f"there is no account {it.account} yet: {create}")  # the home keeps its key for commands
    missing = sorted({systemd_units.CONFIGURED[service] for service in it.services})
    missing = [file for file in missing if not _below(root, Path(it.config_dir) / file).exists()]
    if missing:
        click.echo(f"write {', '.join(missing)} in {it.config_dir} first")
    if place.is_user:
        click.echo("once, so that they run without a session: loginctl enable-linger")
    create = " ".join(["systemd-tmpfiles", *(["--user"] if place.is_user else []), "--create"])
    click.echo(f"then: {create} && {systemctl} daemon-reload")
    click.echo(f"      {systemctl} enable --now {' '.join(map(it.unit_name, it.services))}")


def _state(place: Place, unit: str) -> str:
    """As systemd has it; "unknown" where systemd does not run."""
    if shutil.which("systemctl") is None:
        return "unknown"
    words = [*place.systemctl, "is-active", unit]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return "unknown"
    said = done.stdout.strip()
    return said if re.fullmatch("[a-z]+", said) else "unknown"


def _health(port: int) -> str:
    """ok, or what is wrong."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # 127.0.0.1 needs no proxy
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=ASK_S) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as error:
        try:
            return str(json.load(error)["trouble"])
        except (ValueError, KeyError):
            return f"answers {error.code}"
    except (OSError, ValueError, KeyError) as error:
        return f"no answer on port {port} ({getattr(error, 'reason', error)})"


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _is_ours(path: Path) -> bool:
    with path.open() as file:
        return file.readline().rstrip("\n") == MARK
