# SPDX-License-Identifier: Apache-2.0
"""What the options of several commands have in common: shapes, dtypes, and how a command reaches a running driver."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

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
    place = "[default: driver.aeron_dir, AERON_DIR, Aeron's own]"
    for option in (
        click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="A key of the configuration."),
        click.option("--config", "path", type=click.Path(path_type=Path), help="The driver's TOML file."),
        click.option("--aeron-dir", metavar="DIR", help=f"The media driver's directory.  {place}"),
    ):
        command = option(command)
    return command


def load_config(path: Path | None, settings: tuple[str, ...]) -> DriverConfig:
    """The driver's settings as its clients see them: flags over the environment over the file."""
    return DriverConfig.load(path, overrides=overrides(settings))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Until `StopSignals` takes over, SIGTERM and Ctrl-C interrupt whatever waits: nothing has begun yet."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped before it began", err=True)
        sys.exit(0)
    finally:
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, before)


def overrides(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    """What an option KEY=VALUE says that may be given several times."""
    found = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(option, text, "KEY=VALUE")
        found[key] = value
    return found
