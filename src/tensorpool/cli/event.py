# SPDX-License-Identifier: Apache-2.0
"""`tensorpool event`: sends commands to running services, and prints the messages of the control and status streams.

Service Control §4-§7.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool.cli import options
from tensorpool.errors import ConfigError, DecodeError, RemoteProtocolError

if TYPE_CHECKING:
    from tensorpool import aeron
    from tensorpool.control import ControlConfig
    from tensorpool.control.commander import Until
    from tensorpool.wire.event import EventMessage

FRAGMENT_LIMIT: Final = 64
MAX_COMMANDS: Final = 1024  # kept, to recognise the echo of a command
MAX_VALUE_CHARACTERS: Final = 200
FORMATS: Final = (
    "nothing", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64",
    "boolean", "string", "bytes", "bit", "ref",
)  # fmt: skip
COLOURS: Final = {"accepted": "green", "result": "green", "rejected": "red", "error": "red", "malformed": "red"}


@click.group(name="event")
def command() -> None:
    """Send commands to running services, and watch their answers."""


@command.command(name="send")
@click.argument("tag")
@click.argument("key")
@click.argument("value", required=False)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help=f"How VALUE is sent: {', '.join(FORMATS)}.  [default: string, nothing without VALUE]",
)
@click.option(
    "--wait",
    "until",
    type=click.Choice(["result", "echo", "sent"]),
    default="result",
    show_default=True,
    help="Wait for the result, for the echo of an accepted command, or not at all.",
)
@options.timeout_option(5.0, "How long to wait.")
@options.json_option("Print the outcome as a line of JSON.")
@options.connection_options
def send(
    tag: str,
    key: str,
    value: str | None,
    format_name: str | None,
    until: Until,
    timeout: float,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Send the command KEY to the service TAG, such as `service:driver:driver-01 ping`, and print its result.

    VALUE is text; with --format a number, true or false, hexadecimal bytes, or a reference as STREAM/EPOCH/SEQ. Exit
    code 1: no service answered, or it rejected the command, or the command failed; one line says which.
    """
    from tensorpool.control import Commander
    from tensorpool.wire.event import Format

    format = Format[(format_name or ("nothing" if value is None else "string")).upper()]
    parsed = _parsed(value, format)
    with _connected(connection) as (client, config):
        commander = Commander(client, config)
        outcome = commander.send(tag, key, parsed, timeout=timeout, until=until, format=format)
    if as_json:
        known = msgspec.structs.asdict(outcome)
        name = outcome.format.name if outcome.format is not None else None
        click.echo(msgspec.json.encode(known | {"value": _plain(outcome.value), "format": name}))
    elif until == "result":
        click.echo("done" if outcome.value is None else _shown(outcome.value))
    else:
        click.echo("accepted" if until == "echo" else "sent")


@command.command(name="watch")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Only events with this tag; may be repeated.")
@click.option(
    "--alive",
    "with_alive",
    is_flag=True,
    help="Also print the heartbeat that each service sends every second, and the driver's pages of leases.",
)
@options.count_option("events")
@options.json_option("Print a line of JSON for each event.")
@options.connection_options
def watch(
    tags: tuple[str, ...],
    with_alive: bool,
    count: int,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Print commands, which of them were accepted, and the answers of services, as they arrive.

    Its subscriptions are untethered: Aeron skips it when it stalls, so no publisher waits for it.
    """
    from tensorpool import aeron
    from tensorpool.cli.signals import StopSignals

    stop = StopSignals()
    screen = _Screen(frozenset(tags), count, with_alive=with_alive, as_json=as_json)
    idle = aeron.BackoffIdle()
    with _connected(connection) as (client, config):
        screen.schema_id = config.schema_id
        commands, answers = aeron.subscribe(client, config.control), aeron.subscribe(client, config.status)
        place = f"commands ({config.control_stream_id}) and status ({config.status_stream_id})"
        click.echo(f"listening at {client.dir} to {place}", err=True)
        statuses: list[bytes] = []
        while not stop.count and not screen.is_full:
            received = answers.poll(lambda data, _: statuses.append(data), FRAGMENT_LIMIT)
            while commands.poll(screen.on_command, FRAGMENT_LIMIT):  # so that a command is printed before its echo
                received += 1
            for data in statuses:
                screen.on_status(data)
            statuses.clear()
            idle.idle(received)


@contextlib.contextmanager
def _connected(connection: options.Connection) -> Iterator[tuple[aeron.Client, ControlConfig]]:
    from tensorpool import aeron

    config = connection.load()
    where = connection.aeron_dir or config.driver.aeron_dir or aeron.default_aeron_dir()
    with contextlib.closing(aeron.connect(where, client_name="tensorpool event")) as client:
        yield client, config.control


class _Screen:
    """Prints events. A command is accepted when its exact bytes return on the status stream."""

    def __init__(self, tags: frozenset[str], count: int, *, with_alive: bool, as_json: bool) -> None:
        self.schema_id = 0
        self._tags = tags
        self._count = count
        self._with_alive = with_alive
        self._as_json = as_json
        self._shown = 0
        self._commands: OrderedDict[bytes, None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        return self._count > 0 and self._shown >= self._count

    def on_command(self, data: bytes, info: aeron.MessageInfo) -> None:
        self._commands[data] = None
        if len(self._commands) > MAX_COMMANDS:
            self._commands.popitem(last=False)
        self._show("command", data)

    def on_status(self, data: bytes) -> None:
        if data in self._commands:
            del self._commands[data]
            self._show("accepted", data)
        else:
            self._show("status", data)

    def _show(self, kind: str, data: bytes) -> None:
        from tensorpool.control import events
        from tensorpool.control.identification import LEASES
        from tensorpool.wire import event, peek_header
        from tensorpool.wire.event import EventMessage

        try:
            if peek_header(data).schema_id != self.schema_id:
                return  # another protocol on a shared stream
            message = event.schema.with_id(self.schema_id).decode(data)
        except DecodeError as error:
            self._print({"event": "malformed", "tag": "?", "error": str(error), "bytes": len(data)})
            return
        assert isinstance(message, EventMessage)
        if (self._tags and message.tag not in self._tags) or self.is_full:
            return
        prefix, colon, key = message.key.partition(":")
        if kind == "status" and prefix + colon in events.ANSWERS:
            kind = prefix
        elif kind == "status" and message.key == events.ALIVE:
            kind = "alive"
        if not self._with_alive and (kind == "alive" or (kind, message.key) == ("status", LEASES)):
            return
        key = message.key if kind in ("command", "accepted", "status", "alive") else key
        self._print({"event": kind, "tag": message.tag, "key": key, **_fields(message)})

    def _print(self, fields: dict[str, object]) -> None:
        self._shown += 1
        now_ns = time.time_ns()
        if self._as_json:
            click.echo(msgspec.json.encode({"received_ns": now_ns, **fields}))
            return
        clock = datetime.fromtimestamp(now_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
        kind = str(fields.pop("event"))
        name = click.style(f"{kind:<9}", fg=COLOURS.get(kind, "cyan"), bold=True)
        tag, key, value = _text(fields.pop("tag")), _text(fields.pop("key", "")), fields.pop("value", None)
        sign = ": " if kind in ("rejected", "error") else " = "
        shown = "" if value is None else sign + _text(value)[:MAX_VALUE_CHARACTERS]
        rest = "" if kind == "alive" else f"  #{fields.pop('correlation_id', 0)}"
        if kind == "malformed":
            rest = f" {fields['error']}"
        click.echo(f"{click.style(clock, dim=True)}  {name}  {tag}  {key}{shown}{click.style(rest, dim=True)}")


def _fields(message: EventMessage) -> dict[str, object]:
    from tensorpool.control import read_value

    try:
        format, value = read_value(message)
        shown: dict[str, object] = {"format": format.name, "value": _plain(value)}
    except RemoteProtocolError as error:
        shown = {"format": message.format.name, "value": {"hex": message.value.hex()}, "error": str(error)}
    return {"correlation_id": message.correlation_id, "timestamp_ns": message.timestamp_ns, **shown}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value


def _shown(value: object) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _text(value: object) -> str:
    """On one line: a peer may send line breaks and control characters."""
    text = _shown(value) if not isinstance(value, str) else value
    return text if text.isprintable() else repr(text)[1:-1]


def _parsed(text: str | None, format: object) -> object:
    """VALUE as a value of its format. Raises ConfigError."""
    from tensorpool.control import Ref
    from tensorpool.control.events import NUMBERS
    from tensorpool.wire.event import Format

    assert isinstance(format, Format)
    accepted = {
        Format.NOTHING: "no VALUE",
        Format.STRING: "text",
        Format.BYTES: "hexadecimal bytes",
        Format.BOOLEAN: "true or false",
        Format.BIT: "true or false",
        Format.REF: "a reference STREAM/EPOCH/SEQ",
    }.get(format, "a number")
    try:
        if text is None and format in (Format.NOTHING, Format.STRING, Format.BYTES):
            return {Format.NOTHING: None, Format.STRING: "", Format.BYTES: b""}[format]
        if text is not None:
            if format is Format.STRING:
                return text
            if format is Format.BYTES:
                return bytes.fromhex(text)
            if format in (Format.BOOLEAN, Format.BIT):
                return {"true": True, "false": False}[text]
            if format is Format.REF:
                stream_id, epoch, seq = map(int, text.split("/"))
                return Ref(stream_id, epoch, seq)
            if format in NUMBERS:
                return float(text) if format.name.startswith("FLOAT") else int(text)
    except (ValueError, KeyError):
        pass
    raise ConfigError("VALUE", text, f"{accepted}, for --format {format.name.lower()}")
