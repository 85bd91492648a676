# SPDX-License-Identifier: Apache-2.0
"""What the options of several commands have in common.

Shapes, dtypes, how a command reaches a running driver, and how a service is configured, checked and logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from tensorpool import logs
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError

DTYPES: Final = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool",
)  # fmt: skip
MAX_DIMS: Final = 8


def shape(text: str) -> tuple[int, ...]:
    """An option's type: a tensor's extents as people write them, 720x1280x3."""
    parts = re.split("[x,]", text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > MAX_DIMS:
        raise click.BadParameter(f"{text!r}: give 1 to {MAX_DIMS} positive extents, such as 720x1280x3")
    return tuple(map(int, parts))


def count_option[F: Callable[..., None]](things: str) -> Callable[[F], F]:
    """--count N: end after so many; 0 is no limit."""
    words = f"End after N {things}.  [default: at Ctrl-C]"
    return click.option("--count", type=click.IntRange(min=0), default=0, metavar="N", help=words)


def connection_options[F: Callable[..., None]](command: F) -> F:
    """--aeron-dir, --config and --set: which driver a command talks to. See `load_config`."""
    command = set_option("A key of the configuration.")(command)
    command = config_option("The driver's TOML file.")(command)
    return aeron_dir_option("driver.aeron_dir")(command)


def aeron_dir_option[F: Callable[..., None]](*keys: str) -> Callable[[F], F]:
    """--aeron-dir DIR; without it, what these keys of the configuration say, and then what Aeron says."""
    places = ", ".join((*keys, "AERON_DIR", "Aeron's own"))
    return click.option("--aeron-dir", metavar="DIR", help=f"The media driver's directory.  [default: {places}]")


def config_option[F: Callable[..., None]](words: str, *, is_required: bool = False) -> Callable[[F], F]:
    """--config FILE."""
    return click.option("--config", "path", type=click.Path(path_type=Path), required=is_required, help=words)


def set_option[F: Callable[..., None]](
    words: str = "A key of the configuration; over file and environment.",
) -> Callable[[F], F]:
    """--set KEY=VALUE, several times. See `overrides`."""
    return click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help=words)


def service_options[F: Callable[..., None]](*, json: str, check: str = "print it") -> Callable[[F], F]:
    """--check, --json and --log-level: what `json` prints, and what `check` does once the configuration is fine."""

    def add(command: F) -> F:
        for option in (
            click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True),
            click.option("--json", "as_json", is_flag=True, help=json),
            click.option("--check", is_flag=True, help=f"Validate the configuration, {check}, and end."),
        ):
            command = option(command)
        return command

    return add


def print_settings(values: Mapping[str, object], *, as_json: bool, warnings: Sequence[str] | None = None) -> None:
    """Every setting in effect, for --check; and what is allowed and probably not meant, where a service knows."""
    if as_json:
        click.echo(msgspec.json.encode({"settings": values} | ({} if warnings is None else {"warnings": warnings})))
        return
    for key, value in values.items():
        click.echo(f"{key} = {msgspec.json.encode(value).decode()}")
    for warning in warnings or ():
        click.echo(f"warning: {warning}")


def load_config(path: Path | None, settings: tuple[str, ...]) -> DriverConfig:
    """The driver's settings as its clients see them: flags over the environment over the file."""
    return DriverConfig.load(path, overrides=overrides(settings))


def overrides(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    """What an option KEY=VALUE says that may be given several times."""
    found = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(option, text, "KEY=VALUE")
        found[key] = value
    return found
