# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share.

Shapes, dtypes, how a command reaches a running driver, and how a service is configured, checked and logs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from tensorpool import logs
from tensorpool._core import MAX_DIMS
from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError, TensorPoolError

if TYPE_CHECKING:
    from tensorpool.control import Commander

DTYPES: Final = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool",
)  # fmt: skip
_AGE: Final = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smhd])")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Number(click.FloatRange):
    """A number in a range. `nan` and `inf` are numbers to click, and to no command."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            is_finite = math.isfinite(float(value))
        except ValueError:
            is_finite = False
        if not is_finite:
            self.fail(f"{value!r} is no number.", param, ctx)
        return float(super().convert(value, param, ctx))


class Age(click.ParamType[float]):
    """90s, 30m, 12h, 7d."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = _AGE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r}: give a number with s, m, h or d, such as 7d", param, ctx)
        return float(match["number"]) * _UNITS[match["unit"]]


class Size(click.ParamType[int]):
    """512m, 20g."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+)([kmgt]?)", str(value).lower())
        if match is None or int(match[1]) == 0:
            self.fail(f"{value!r}: give a number of bytes, with k, m, g or t, such as 20g", param, ctx)
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2]]


class Connection(msgspec.Struct, frozen=True):
    """Which driver a command talks to: --aeron-dir, --config and --set as the user gave them."""

    aeron_dir: str | None
    path: Path | None
    settings: tuple[str, ...]

    def load(self) -> DriverConfig:
        """The driver's settings as its clients see them: flags over the environment over the file."""
        return DriverConfig.load(self.path, overrides=overrides(self.settings))


@contextlib.contextmanager
def commanding(connection: Connection) -> Iterator[tuple[Commander, DriverConfig]]:
    """A commander of services at the connection's media driver, and the configuration."""
    from tensorpool import aeron
    from tensorpool.control import Commander

    config = connection.load()
    where = connection.aeron_dir or config.driver.aeron_dir or aeron.default_aeron_dir()
    with contextlib.closing(aeron.connect(where, client_name="tensorpool command")) as client:
        yield Commander(client, config.control), config


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --aeron-dir, --config and --set; the command receives them as one argument, `connection`."""

    @functools.wraps(command)
    def call(*, aeron_dir: str | None, path: Path | None, settings: tuple[str, ...], **arguments: Any) -> None:
        command(connection=Connection(aeron_dir, path, settings), **arguments)

    wrapped: Callable[..., None] = set_option("A key of the configuration.")(call)
    wrapped = config_option("The driver's TOML file.")(wrapped)
    return aeron_dir_option("driver.aeron_dir")(wrapped)


def shape(text: str) -> tuple[int, ...]:
    """Type of an option: a tensor's extents as people write them, 720x1280x3."""
    parts = re.split("[x,]", text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > MAX_DIMS:
        raise click.BadParameter(f"{text!r}: give 1 to {MAX_DIMS} positive extents, such as 720x1280x3")
    return tuple(map(int, parts))


def stream_reference(text: str) -> int | str:
    """A stream as a user names it: digits are an id, anything else is a name."""
    return int(text) if text.isascii() and text.isdecimal() else text


def count_option[F: Callable[..., None]](things: str) -> Callable[[F], F]:
    """--count N: end after so many; 0 is no limit."""
    text = f"End after N {things}.  [default: at Ctrl-C]"
    return click.option("--count", type=click.IntRange(min=0), default=0, metavar="N", help=text)


def seconds_option[F: Callable[..., None]](text: str = "End after S seconds.") -> Callable[[F], F]:
    """--seconds S."""
    return click.option("--seconds", type=Number(min=0, min_open=True), metavar="S", help=text)


def timeout_option[F: Callable[..., None]](
    default: float, text: str, *, least: float = 0.0, is_least_allowed: bool = True
) -> Callable[[F], F]:
    """--timeout S."""
    allowed = Number(min=least, min_open=not is_least_allowed)
    return click.option("--timeout", type=allowed, default=default, show_default=True, metavar="S", help=text)


def json_option[F: Callable[..., None]](text: str = "Print JSON.") -> Callable[[F], F]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def lake_argument[F: Callable[..., None]](command: F) -> F:
    """LAKE: the folder of a lake."""
    return click.argument("lake", type=click.Path(path_type=Path))(command)


def aeron_dir_option[F: Callable[..., None]](*keys: str) -> Callable[[F], F]:
    """--aeron-dir DIR; without it the value of these keys of the configuration, then Aeron's own default."""
    places = ", ".join((*keys, "AERON_DIR", "Aeron's own"))
    return click.option("--aeron-dir", metavar="DIR", help=f"The media driver's directory.  [default: {places}]")


def config_option[F: Callable[..., None]](text: str, *, is_required: bool = False) -> Callable[[F], F]:
    """--config FILE."""
    return click.option("--config", "path", type=click.Path(path_type=Path), required=is_required, help=text)


def set_option[F: Callable[..., None]](
    text: str = "A key of the configuration; it overrides file and environment.",
) -> Callable[[F], F]:
    """--set KEY=VALUE, several times. See `overrides`."""
    return click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help=text)


def service_options[F: Callable[..., None]](*, json: str, check: str = "print it") -> Callable[[F], F]:
    """--check, --json and how it logs: what `json` prints, and what `check` does with a valid configuration."""

    def add(command: F) -> F:
        for option in (
            click.option(
                "--log-format",
                type=click.Choice(logs.FORMATS),
                default="auto",
                show_default=True,
                envvar="TENSORPOOL_LOG_FORMAT",
                expose_value=False,
                callback=lambda context, option, value: logs.choose_format(value),
                help="How the log is written to stderr; auto: for people on a terminal, else for the journal or JSON.",
            ),
            click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True),
            json_option(json),
            click.option("--check", is_flag=True, help=f"Validate the configuration, {check}, and end."),
        ):
            command = option(command)
        return command

    return add


def print_settings(values: Mapping[str, object], *, as_json: bool, warnings: Sequence[str] | None = None) -> None:
    """For --check: every setting in effect, and a warning for each that is allowed but probably a mistake."""
    if as_json:
        click.echo(msgspec.json.encode({"settings": values} | ({} if warnings is None else {"warnings": warnings})))
        return
    for key, value in values.items():
        click.echo(f"{key} = {msgspec.json.encode(value).decode()}")
    for warning in warnings or ():
        click.echo(f"warning: {warning}")


def print_reload(reload: Callable[[], Iterable[str]]) -> None:
    """After SIGHUP: how the configuration differs, or why it stays as it is."""
    try:
        for line in tuple(reload()) or ("nothing differs",):
            logs.say(line)
    except TensorPoolError as error:
        logs.say(f"error: {error}", err=True)


def overrides(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    """The values of a repeated option KEY=VALUE by their keys."""
    found = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(option, text, "KEY=VALUE")
        found[key] = value
    return found
