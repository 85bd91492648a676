# SPDX-License-Identifier: Apache-2.0
"""A commander: sends a command, sees its echo on the status stream, then its result.

A correlation id is random, so that neither another commander's answers nor those that still lie in the log from before
are taken for ours. Service Control §4, §6; decisions H2, H5.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from typing import Any, Final, Literal

import msgspec

from tensorpool import aeron
from tensorpool.channel import check_channel
from tensorpool.control import events
from tensorpool.control.config import ControlConfig, check_tag
from tensorpool.control.errors import CommandFailed, CommandRejected, CommandUnfinished, CommandUnheard
from tensorpool.control.events import make_event, read_alive, read_value
from tensorpool.control.link import subscribe
from tensorpool.errors import DecodeError, LocalProtocolError, RemoteProtocolError
from tensorpool.wire import event
from tensorpool.wire.event import EventMessage, Format

FRAGMENT_LIMIT: Final = 64
IDENTITY: Final = struct.Struct("<2xHH2x8xq")  # template, schema and correlation id
NOT_YET: Final = 0.001
MAX_ALIVE: Final = 64  # names in an error

type Until = Literal["sent", "echo", "result"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command that succeeded as far as it was waited for."""

    tag: str
    key: str
    correlation_id: int
    is_accepted: bool  # its echo was seen
    service: str | None = None  # the tag of whoever sent the result
    value: events.Value = None
    format: Format | None = None

    @property
    def json(self) -> Any:
        """The value of a result that is JSON, such as that of `status`."""
        return msgspec.json.decode(self.value if isinstance(self.value, str | bytes) else b"null")


class _Pending(msgspec.Struct):
    """A command on its way."""

    key: str
    data: bytes
    is_accepted: bool = False
    answer: EventMessage | None = None

    def take(self, message: EventMessage) -> None:
        """The first answer counts, and a result only behind its echo: without one nothing was accepted."""
        prefix, _, key = message.key.partition(":")
        is_rejected = f"{prefix}:" == events.REJECTED and not self.is_accepted
        is_done = f"{prefix}:" in (events.RESULT, events.ERROR) and self.is_accepted and key == self.key
        if self.answer is None and (is_rejected or is_done):
            self.answer = message


class Commander:
    """Commands services. Several may do so at once, also several threads through one commander.

    >>> commander = Commander(aeron.connect(), ControlConfig())                       # doctest: +SKIP
    >>> commander.send("service:recorder:lab1", "pause", timeout=5.0).value           # doctest: +SKIP
    'paused'

    Raises TransportError when the streams cannot be opened.
    """

    def __init__(self, client: aeron.Client, config: ControlConfig | None = None) -> None:
        self.config: Final = config or ControlConfig()
        self._schema = event.schema.with_id(self.config.schema_id)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._alive: set[str] = set()
        self._is_local = check_channel("channel", self.config.status_channel).media == "ipc"
        self._status = subscribe(client, self.config.status)
        try:
            self._control = client.add_publication(self.config.control_channel, self.config.control_stream_id)
        except BaseException:
            self._status.close()
            raise

    @property
    def alive(self) -> list[str]:
        """The tags of services that were heard while a command waited."""
        return sorted(self._alive)

    def send(
        self,
        tag: str,
        key: str,
        value: object = None,
        *,
        timeout: float = 2.0,
        until: Until = "result",
        format: Format | None = None,
    ) -> Outcome:
        """Send a command and wait for its echo and its result, `timeout` seconds for all of it.

        Services that only echo, as the specification has it, are waited for until "echo". Raises CommandUnheard,
        CommandRejected, CommandFailed or CommandUnfinished, and LocalProtocolError for a value that has no format.
        """
        check_tag("tag", tag)
        if not key.isascii():
            raise LocalProtocolError(f"key {key!r}: a key is ASCII")
        correlation_id = secrets.randbits(63)
        stamp_ns = time.time_ns()
        message = make_event(tag, key, value, correlation_id=correlation_id, timestamp_ns=stamp_ns, format=format)
        pending = _Pending(key, self._schema.encode(message))
        deadline_s = time.monotonic() + timeout
        self._pending[correlation_id] = pending
        try:
            self._offer(message, pending.data, deadline_s, timeout)
            return self._wait(message, pending, deadline_s, timeout, until)
        finally:
            del self._pending[correlation_id]

    def close(self) -> None:
        self._control.close()
        self._status.close()

    # --- inside

    def _offer(self, message: EventMessage, data: bytes, deadline_s: float, timeout: float) -> None:
        """A UDP stream takes a moment to connect, a full log to be read."""
        if len(data) > self._control.max_message_length:
            limit = self._control.max_message_length
            raise LocalProtocolError(f"a command of {len(data)} bytes; the control stream takes {limit}")
        result = aeron.OfferResult.NOT_CONNECTED
        while not (self._would_hear(deadline_s - timeout / 2) and (result := self._control.offer(data))):
            self._poll()
            if time.monotonic() >= deadline_s:
                raise CommandUnheard(message.tag, message.key, self._why_not_sent(result, timeout))
            time.sleep(NOT_YET)

    def _would_hear(self, at_latest_s: float) -> bool:
        """Whether an answer would be heard: on IPC from the start. Over UDP we send after a while all the same."""
        return self._is_local or self._status.is_connected or time.monotonic() >= at_latest_s

    def _wait(
        self, message: EventMessage, pending: _Pending, deadline_s: float, timeout: float, until: Until
    ) -> Outcome:
        tag, key = message.tag, message.key
        while until != "sent":
            self._poll()
            answer = pending.answer
            if answer is not None and answer.key.startswith(events.REJECTED):
                raise CommandRejected(tag, key, _text(answer))
            if answer is not None and answer.key.startswith(events.ERROR):
                raise CommandFailed(tag, key, _text(answer))
            if answer is not None or (until == "echo" and pending.is_accepted):
                break
            if time.monotonic() >= deadline_s:
                raise self._too_late(tag, key, pending, timeout)
            time.sleep(NOT_YET)
        return _outcome(message, pending)

    def _poll(self) -> None:
        with self._lock:
            self._status.poll(self._on_status, FRAGMENT_LIMIT)

    def _on_status(self, data: bytes, info: aeron.MessageInfo) -> None:
        if len(data) < IDENTITY.size:
            return
        template_id, schema_id, correlation_id = IDENTITY.unpack_from(data)
        if (template_id, schema_id) != (EventMessage.TEMPLATE_ID, self._schema.id):
            return
        pending = self._pending.get(correlation_id)
        if pending is not None and data == pending.data:
            pending.is_accepted = True
            return
        try:
            message = self._schema.decode(data)
        except DecodeError:
            return
        assert isinstance(message, EventMessage)
        if pending is not None:
            pending.take(message)
        elif len(self._alive) < MAX_ALIVE and read_alive(message) is not None:
            self._alive.add(message.tag)

    def _why_not_sent(self, result: aeron.OfferResult, timeout: float) -> str:
        place = f"stream {self.config.control_stream_id} of {self.config.control_channel}"
        if result is aeron.OfferResult.NOT_CONNECTED:
            return f"nobody subscribes to the control {place}; is the service running, with control.enabled?"
        return f"the control {place} had no room for {timeout:g} s; a subscriber does not read"

    def _too_late(self, tag: str, key: str, pending: _Pending, timeout: float) -> CommandUnheard | CommandUnfinished:
        if pending.is_accepted:
            return CommandUnfinished(tag, key, f"waited {timeout:g} s; it may still be running")
        if tag in self._alive:
            found = "it is alive: it came after the command, is busy, or dropped it; send it again"
        else:
            found = f"alive are {', '.join(self.alive)}" if self._alive else "no service is heard at all"
        return CommandUnheard(tag, key, f"waited {timeout:g} s; {found}")


def _outcome(message: EventMessage, pending: _Pending) -> Outcome:
    answer = pending.answer
    format, value = (None, None) if answer is None else _read(answer)
    return Outcome(
        tag=message.tag,
        key=message.key,
        correlation_id=message.correlation_id,
        is_accepted=pending.is_accepted,
        service=None if answer is None else answer.tag,
        value=value,
        format=format,
    )


def _read(answer: EventMessage) -> tuple[Format, events.Value]:
    """A result that is not of its format stays bytes."""
    try:
        return read_value(answer)
    except RemoteProtocolError:
        return Format.BYTES, answer.value


def _text(answer: EventMessage) -> str:
    return answer.value.decode("utf-8", "backslashreplace")
