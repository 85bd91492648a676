# SPDX-License-Identifier: Apache-2.0
"""Commands from a page to running services. Those that change something have to be confirmed."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec

from tensorpool import aeron
from tensorpool.control import Commander
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import LocalProtocolError

READING: Final = frozenset({"ping", "status", "view"})  # and log-level without a level
TIMEOUT_S: Final = 5.0
_COMMON: Final = ("status", "log-level", "drain")
_PAUSABLE: Final = frozenset({"bridge", "recorder"})


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From a page. A command takes one value or none: the first of its arguments."""

    command: str
    arguments: dict[str, str | int | float | bool] = {}
    confirmed: bool = False

    @property
    def value(self) -> str | int | float | bool | None:
        return next(iter(self.arguments.values()), None)


def offered(service: str) -> tuple[str, ...]:
    """The commands of a kind of service that pages have buttons for."""
    return (*_COMMON, "pause", "resume") if service in _PAUSABLE else _COMMON


def needs_confirmation(command: Command) -> bool:
    """Whether it changes something."""
    is_question = command.command == "log-level" and command.value is None
    return command.command not in READING and not is_question


def send(config: DriverConfig, aeron_dir: str, tag: str, command: Command) -> Any:
    """Send it and wait for its result. Raises CommandError, TransportError, LocalProtocolError."""
    if len(command.arguments) > 1:
        raise LocalProtocolError(f"{command.command}: a command takes one value or none")
    with contextlib.closing(aeron.connect(aeron_dir, client_name="tensorpool console")) as client:
        commander = Commander(client, config.control)
        with contextlib.closing(commander):
            outcome = commander.send(tag, command.command, command.value, timeout=TIMEOUT_S)
    value = outcome.value
    if isinstance(value, str):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(value)  # `status` answers with JSON
    return value.hex() if isinstance(value, bytes) else msgspec.to_builtins(value)
