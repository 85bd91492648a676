# SPDX-License-Identifier: Apache-2.0
"""A commander: sends a command, receives its echo on the status stream, then its result.

A correlation id is random, so that neither another commander's answers nor those of the backlog are taken for ours.
Service Control §4, §6; decisions H2, H5.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from typing import Any, Final, Literal

import msgspec

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.control import authorisation, events
from tensorpool.control.authorisation import UNAUTHORISED
from tensorpool.control.config import ControlConfig, check_tag
from tensorpool.control.errors import CommandFailed, CommandRejected, CommandUnanswered, CommandUnfinished
from tensorpool.control.events import make_event, read_alive, read_value
from tensorpool.control.identification import SENDER, Sender
from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire import event
from tensorpool.wire.event import EventMessage, Format

FRAGMENT_LIMIT: Final = 64
_CORRELATION_ID: Final = struct.Struct("<8x8xq")  # behind the header and the timestamp
NOT_YET: Final = 0.001
MAX_ALIVE: Final = 64  # names in an error

type Until = Literal["sent", "echo", "result"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A command that succeeded, as far as its sender waited."""

    tag: str
    key: str
    correlation_id: int
    is_accepted: bool  # its echo was seen
    service: str | None = None  # the tag of the service that sent the result
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
    """Commands services. Several commanders may do so at once, and several threads through one commander.

    >>> commander = Commander(aeron.connect(), ControlConfig())                       # doctest: +SKIP
    >>> commander.send("service:recorder:lab1", "pause", timeout=5.0).value           # doctest: +SKIP
    'paused'

    It declares its process to the service before each command that it signs, and before all where it `is_declared`.
    Raises TransportError when the streams cannot be opened.
    """

    def __init__(self, client: aeron.Client, config: ControlConfig | None = None, *, is_declared: bool = False) -> None:
        self._is_declared = is_declared
        self.config: Final = config or ControlConfig()
        self._schema = event.schema.with_id(self.config.schema_id)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._alive: set[str] = set()
        self._client = client
        self._is_local = self.config.status.uri.is_ipc
        self._adapter = MessageAdapter(on_malformed=lambda data, error: None)
        self._adapter.add_undecoded(EventMessage, self._on_event, self._schema)
        self._status = aeron.subscribe(client, self.config.status)
        try:
            self._control = client.add_publication(self.config.control_channel, self.config.control_stream_id)
        except BaseException:
            self._status.close()
            raise

    @property
    def alive(self) -> list[str]:
        """The tags of services that sent a sign of life while a command waited."""
        return sorted(self._alive)

    def send(
        self,
        tag: str,
        key: str,
        value: object = None,
        *,
        timeout: float | None = None,
        until: Until = "result",
        format: Format | None = None,
    ) -> Outcome:
        """Send a command and wait for its echo and its result, `timeout` seconds for all of it.

        Without a `timeout` it waits for `control.command_timeout_ms` (2 s).
        A command that the service accepts from authorised senders only is sent again with a signature.
        Services that only echo, as the specification has it, are waited for until "echo". Raises CommandUnanswered,
        CommandRejected, CommandFailed or CommandUnfinished, and LocalProtocolError for a value that has no format.
        """
        check_tag("tag", tag)
        if not key.isascii():
            raise LocalProtocolError(f"key {key!r}: a key is ASCII")
        timeout = self.config.command_timeout_ms / 1e3 if timeout is None else timeout
        deadline_s = time.monotonic() + timeout
        message = self._message(tag, key, value, format)
        if self._is_declared:
            self._declare(message)
        try:
            return self._exchange(message, deadline_s, timeout, until)
        except CommandRejected as error:
            if not error.reason.startswith(UNAUTHORISED):
                raise
        # Only the service knows which commands have to be signed, and a service that expects no signature would take it
        # for a part of the value. A sender that has no secret declares itself too: the audit log names who was refused.
        signer = authorisation.signer(self.config)
        message = self._message(tag, key, value, format)
        self._declare(message)
        return self._exchange(message if signer is None else signer.sign(message), deadline_s, timeout, until)

    def _declare(self, message: EventMessage) -> None:
        """Say for the service's audit log who sends the command that follows; nothing depends on it."""
        process = ProcessIdentity.own()
        if process is not None:
            sender = Sender(
                correlation_id=message.correlation_id, process=process, description=ProcessDescription.own()
            )
            self._control.offer(self._schema.encode(self._message(message.tag, SENDER, sender, None)))

    @staticmethod
    def _message(tag: str, key: str, value: object, format: Format | None) -> EventMessage:
        number, stamp_ns = secrets.randbits(63), time.time_ns()
        return make_event(tag, key, value, correlation_id=number, timestamp_ns=stamp_ns, format=format)

    def _exchange(self, message: EventMessage, deadline_s: float, timeout: float, until: Until) -> Outcome:
        pending = _Pending(message.key, self._schema.encode(message))
        correlation_id = message.correlation_id
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
        while not (self._would_receive_answer(deadline_s - timeout / 2) and (result := self._control.offer(data))):
            self._poll()
            if time.monotonic() >= deadline_s:
                raise CommandUnanswered(message.tag, message.key, self._why_not_sent(result, timeout))
            time.sleep(NOT_YET)
        self._client.ring(aeron.Bell.CONTROL)

    def _would_receive_answer(self, at_latest_s: float) -> bool:
        """Whether an answer would be received: on IPC always. Over UDP the command is sent after a while anyway."""
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
            self._status.poll(self._adapter.on_message, FRAGMENT_LIMIT)

    def _on_event(self, data: bytes, info: aeron.MessageInfo) -> None:
        if len(data) < _CORRELATION_ID.size:
            return
        pending = self._pending.get(_CORRELATION_ID.unpack_from(data)[0])
        if pending is not None and data == pending.data:
            pending.is_accepted = True
            return
        message = self._schema.decode(data)
        assert isinstance(message, EventMessage)
        if pending is not None:
            pending.take(message)
        elif len(self._alive) < MAX_ALIVE and read_alive(message) is not None:
            self._alive.add(message.tag)

    def _why_not_sent(self, result: aeron.OfferResult, timeout: float) -> str:
        place = f"stream {self.config.control_stream_id} of {self.config.control_channel}"
        if result is aeron.OfferResult.NOT_CONNECTED:
            return f"no service subscribes to the control {place}; is the service running, with control.enabled?"
        return f"the control {place} had no room for {timeout:g} s; a subscriber does not read"

    def _too_late(self, tag: str, key: str, pending: _Pending, timeout: float) -> CommandUnanswered | CommandUnfinished:
        if pending.is_accepted:
            return CommandUnfinished(tag, key, f"waited {timeout:g} s; it may still be running")
        if tag in self._alive:
            found = "it is alive: it came after the command, is busy, or dropped it; send it again"
        else:
            found = f"alive are {', '.join(self.alive)}" if self._alive else "no service sends heartbeats"
        return CommandUnanswered(tag, key, f"waited {timeout:g} s; {found}")


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
