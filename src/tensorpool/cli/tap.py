# SPDX-License-Identifier: Apache-2.0
"""`tensorpool tap`: prints the messages of an Aeron directory as they arrive.

It takes no lease, and its subscriptions are untethered: Aeron skips it when it stalls, so publishers never wait for it.
Tokens of shutdown requests are not printed. Wire §5, §10; Driver Model §4.4.
"""

from __future__ import annotations

import contextlib
import difflib
import time
from datetime import datetime
from typing import Final

import click
import msgspec

from tensorpool import aeron
from tensorpool.aeron.adapter import has_kind
from tensorpool.channel import Endpoint
from tensorpool.cli import format, options
from tensorpool.cli.decode import plain_fields
from tensorpool.cli.signals import StopSignals
from tensorpool.driver.config import DriverSection
from tensorpool.errors import DecodeError
from tensorpool.wire import Message, bridge, control, decode, discovery, driver, event, merge, trace

FRAGMENT_LIMIT: Final = 64
MAX_HEX_BYTES: Final = 32
MALFORMED: Final = "malformed"
KINDS: Final = frozenset(
    kind.__name__
    for module in (control, driver, bridge, merge, trace, event, discovery)
    for kind in (*module.schema.messages.values(), *module.schema.dialects.values())
) | {MALFORMED}


def _kinds(text: str) -> frozenset[str]:
    """Type of an option: names of messages, separated by commas."""
    wanted = frozenset(filter(None, text.split(",")))
    for name in sorted(wanted - KINDS):
        close = difflib.get_close_matches(name, KINDS, 1, 0.5)
        raise click.BadParameter(
            f"{name!r} is not the name of a message" + (f"; did you mean {close[0]}?" if close else "")
        )
    return wanted


@click.command(name="tap")
@click.option("--descriptors", is_flag=True, help="Also print one FrameDescriptor per frame.")
@click.option("--only", type=_kinds, metavar="NAME,…", help="Only messages of these types, such as QosConsumer.")
@click.option(
    "--stream", "stream_id", type=click.IntRange(min=1), metavar="ID", help="Only messages about this stream."
)
@options.count_option("messages")
@options.json_option("Print a line of JSON for each message.")
@options.connection_options
def command(
    descriptors: bool,
    only: frozenset[str] | None,
    stream_id: int | None,
    count: int,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Print the live messages of an Aeron directory: attaches, announces, reports, detaches.

    Subscribes to the control, announce, QoS and metadata streams. A malformed message is printed with its fault.
    """
    endpoints = connection.load().driver
    where = connection.aeron_dir or endpoints.aeron_dir or aeron.default_aeron_dir()
    streams = _streams(endpoints, with_descriptors=descriptors or "FrameDescriptor" in (only or ()))
    stop = StopSignals()
    screen = _Screen(only, stream_id, count, as_json=as_json)
    idle = aeron.BackoffIdle()
    with contextlib.closing(aeron.connect(where, client_name="tensorpool tap")) as client:
        listeners = [_Listener(client, name, endpoint, screen) for name, endpoint in streams.items()]
        names = ", ".join(f"{name} ({endpoint.stream_id})" for name, endpoint in streams.items())
        click.echo(f"listening at {where} to {names}", err=True)
        while not stop.count and not screen.is_full:
            idle.idle(sum(listener.poll() for listener in listeners))


def _streams(endpoints: DriverSection, *, with_descriptors: bool) -> dict[str, Endpoint]:
    """The Aeron streams by name; announces on the control stream are subscribed to once."""
    found = {"control": endpoints.control}
    if endpoints.announce != endpoints.control:
        found["announce"] = endpoints.announce
    found |= {"qos": endpoints.qos, "metadata": endpoints.metadata}
    return found | {"descriptor": endpoints.descriptor} if with_descriptors else found


class _Listener:
    """Subscription to one Aeron stream."""

    def __init__(self, client: aeron.Client, name: str, endpoint: Endpoint, screen: _Screen) -> None:
        self._name = name
        self._screen = screen
        self._left_at: dict[int, int] = {}  # position of each publisher when Aeron dropped its image
        self._subscription = aeron.subscribe(client, endpoint, self._on_image)

    def poll(self) -> int:
        return self._subscription.poll(self._on_message, FRAGMENT_LIMIT)

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        self._screen.show(self._name, data, info.session_id)

    def _on_image(self, image: aeron.ImageEvent) -> None:
        if not image.available:
            self._left_at[image.session_id] = image.position
        elif image.session_id in self._left_at:
            missed = image.position - self._left_at.pop(image.session_id)
            click.echo(f"fell behind: missed {format.size(missed)} of {self._name}", err=True)


class _Screen:
    """Prints the messages that pass the filters."""

    def __init__(self, only: frozenset[str] | None, stream_id: int | None, count: int, *, as_json: bool) -> None:
        self._only = only
        self._stream_id = stream_id
        self._count = count
        self._as_json = as_json
        self._shown = 0

    @property
    def is_full(self) -> bool:
        return self._count > 0 and self._shown >= self._count

    def show(self, aeron_stream: str, data: bytes, session_id: int) -> None:
        try:
            message = decode(data)
        except DecodeError as error:
            kind, fields = MALFORMED, {"error": str(error), "bytes": len(data), **_shown_bytes(data)}
        else:
            kind, fields = type(message).__name__, _shown_fields(message)
        if self.is_full or (self._only is not None and kind not in self._only):
            return
        if self._stream_id is not None and fields.get("stream_id") != self._stream_id:
            return
        self._shown += 1
        now_ns = time.time_ns()
        if self._as_json:
            line = {"received_ns": now_ns, "aeron_stream": aeron_stream, "session_id": session_id, "message": kind}
            click.echo(msgspec.json.encode(line | fields))
            return
        clock = datetime.fromtimestamp(now_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
        name = click.style(f"{kind:<18}", fg="red" if kind == MALFORMED else "cyan", bold=True)
        click.echo(f"{click.style(clock, dim=True)}  {aeron_stream:<10}  {name}  {_text(fields)}")


def _shown_fields(message: Message) -> dict[str, object]:
    fields = plain_fields(message)
    return fields | {"token": "<hidden>"} if fields.get("token") else fields


def _shown_bytes(data: bytes) -> dict[str, object]:
    """As `plain_fields` shows bytes; empty for a message that may hold a token."""
    return {} if has_kind(data, driver.ShmDriverShutdownRequest) else {"data": {"hex": data.hex()}}


def _text(value: object) -> str:
    """Fields as name=value, without empty ones."""
    match value:
        case {"hex": str(digits), **others} if not others:
            return _bytes_text(bytes.fromhex(digits))
        case dict():
            filled = ((name, field) for name, field in value.items() if field not in (None, "", []))
            return " ".join(f"{name}={_nested(_short(name, field))}" for name, field in filled)
        case list():
            return "[" + ", ".join(map(_nested, value)) + "]"
        case bool():
            return str(value).lower()
        case str():
            return value if value.isprintable() and value and " " not in value else repr(value)
    return str(value)


def _bytes_text(data: bytes) -> str:
    """As text where all of it is printable, else the first bytes."""
    if data.isascii() and data.decode().isprintable():
        return repr(data.decode())
    return data[:MAX_HEX_BYTES].hex() + ("…" if len(data) > MAX_HEX_BYTES else "")


def _short(name: str, value: object) -> object:
    """Shortens a region's path, which repeats the stream and its epoch."""
    is_region = name.endswith("region_uri") and isinstance(value, str)
    return "…/" + str(value).rpartition("/")[2] if is_region else value


def _nested(value: object) -> str:
    is_group = isinstance(value, dict) and value.keys() != {"hex"}
    return f"({_text(value)})" if is_group else _text(value)
