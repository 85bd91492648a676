# SPDX-License-Identifier: Apache-2.0
"""A service: receives the commands for its tag, echoes those it accepts, runs them, and publishes their results.

    received ──filter: schema, tag──► read ──key, value, rate, origin──► echoed ──► run ──► result: or error:
                  │ counted            │ no: rejected: with the reason     │ not in time: rejected:, not run

Never blocks and starts no thread: the host calls `invoke` from its own duty cycle. A command runs only once its echo is
on the status stream, which is the record of what was accepted: one that changes state waits for a subscriber as long as
a commander waits for an answer. The echo of a query (ping, status) is kept instead, and sent to the next subscriber. A
result that finds no room is dropped and counted. The control plane attaches no process to shared memory.
Service Control §4-§7; decisions H1-H3, H5, H7, K5.
"""

from __future__ import annotations

import functools
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Final

import msgspec

from tensorpool import _core, aeron
from tensorpool.audit_log import AuditLog
from tensorpool.clock import Clock, SystemClock
from tensorpool.control import events
from tensorpool.control.authorisation import authority
from tensorpool.control.commands import KEY, Command, Unacceptable
from tensorpool.control.config import ControlConfig, check_tag
from tensorpool.control.events import Alive, State, make_event
from tensorpool.control.identification import SENDER, Sender
from tensorpool.control.streams import ServiceStreams
from tensorpool.errors import DISTRIBUTION, Closed, DecodeError, LocalProtocolError, TensorPoolError, TransportError
from tensorpool.logs import get_logger
from tensorpool.peer_text import printable
from tensorpool.wire import event
from tensorpool.wire.event import EventMessage

FRAGMENT_LIMIT: Final = 64  # read in one turn
OUTBOX_LIMIT: Final = 64
WAITING_LIMIT: Final = 64
PATIENCE_NS: Final = 1_000_000_000  # with a status stream that has no room for a result
BIND_AGAIN_NS: Final = 5_000_000_000
MAX_SHOWN: Final = 200  # letters of a value in the audit log
MAX_REASON_BYTES: Final = 1024
SIGN_WITHIN_NS: Final = 1_000_000_000
UNKNOWN: Final[dict[str, object]] = {"identity": "unknown"}
MAX_SENDERS: Final = 64  # of commands that are expected
EVENT_BYTES: Final = 512  # of an event beside its value, at most


class _Accepted(msgspec.Struct):
    """A command that waits for its echo to be on the status stream."""

    data: bytes
    message: EventMessage
    command: Command
    arguments: tuple[object, ...]
    deadline_ns: int


class _Refused(msgspec.Struct, frozen=True):
    """A command that was not accepted from its sender, until that is logged."""

    key: str
    correlation_id: int
    sender: dict[str, object]
    reason: str
    due_ns: int


class Service:
    """Something that can be commanded by EventMessages to its tag.

    >>> service = Service("recorder", instance="lab1")
    >>> @service.command("gain")
    ... def set_gain(value: float) -> str:
    ...     return f"the gain is {value}"
    >>> service.bind(client)                         # doctest: +SKIP
    >>> while running: service.invoke()              # doctest: +SKIP

    The tag is `service:<name>` or `service:<name>:<instance>`; only its exact bytes, or those of an alias, address it.
    What a handler returns becomes the result, what it raises the error; the service lives on. All of it belongs to the
    thread that calls `invoke`, but `state`, which any may set. Raises ConfigError for a name that no tag can have.
    """

    def __init__(
        self,
        name: str,
        instance: str | None = None,
        *,
        config: ControlConfig | None = None,
        aliases: Iterable[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self.name: Final = name
        self.instance: Final = instance
        self.config: Final = config or ControlConfig()
        self.tag: Final = check_tag("service tag", f"service:{name}" + (f":{instance}" if instance else ""))
        self.aliases: Final = tuple(check_tag("control.aliases", tag) for tag in (*self.config.aliases, *aliases))
        self._clock = clock or SystemClock()
        self._log = get_logger("control", tag=self.tag)
        self._audit_log = AuditLog(service=name, instance_id=instance)
        self._schema = event.schema.with_id(self.config.schema_id)
        self._filter = _core.EventFilter(self.config.schema_id, [self.tag, *self.aliases])
        self._commands: dict[str, Command] = {SENDER: Command(SENDER, self._on_sender, is_note=True)}
        self._refusals: dict[str, _Refused] = {}  # by key, at most one of each
        self._senders: OrderedDict[int, dict[str, object]] = OrderedDict()  # by correlation id of their command
        self._authority = authority(self.config)
        self._counts: Counter[str] = Counter()
        self._client: aeron.Client | None = None
        self._is_patient = False
        self._streams: ServiceStreams | None = None
        self._bind_ns = 0
        self._trouble = ""  # that was logged last
        self._inbox: deque[bytes] = deque()
        self._waiting: deque[_Accepted] = deque()
        self._outbox: deque[tuple[bytes, int | None]] = deque()  # each with its deadline; an echo has none
        self._afterwards: deque[Callable[[], object]] = deque()
        self._state = State.RUNNING
        self._alive_ns = 0
        self._allowance = float(self.config.commands_per_s)
        self._allowed_ns = self._clock.monotonic_ns()

    @property
    def is_bound(self) -> bool:
        """Whether it receives commands."""
        return self._streams is not None

    @property
    def state(self) -> State:
        """Part of every `alive`; a change is published in the next turn."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._alive_ns = 0

    @property
    def keys(self) -> list[str]:
        """The commands that it knows, without notes."""
        return sorted(key for key, command in self._commands.items() if not command.is_note)

    @property
    def counts(self) -> dict[str, int]:
        """Messages by what was done with them."""
        before = {} if self._streams is None else {"from_before": self._streams.from_before}
        filtered = self._filter.counts
        filtered["malformed"] += self._counts["malformed"]
        return {"over_rate": 0, **self._counts, **filtered, **before}

    def command[F: Callable[..., object]](
        self,
        key: str,
        *,
        refuse: Callable[[], str | None] | None = None,
        is_query: bool = False,
        is_note: bool = False,
        authorised: bool = False,
    ) -> Callable[[F], F]:
        """A decorator: the function answers `key`. Its parameter's annotation says which values are accepted.

        `refuse` may say why the command cannot be accepted now. A query changes no state: it is accepted also from the
        network, and runs without a reader of the status stream. A note is a query that clients send by themselves: it
        counts towards no rate, and its echo is dropped where there is no reader. With `authorised` a command is
        accepted only from senders that have the service's secret: see `control.authorisation`.
        Raises LocalProtocolError.
        """

        def register(handler: F) -> F:
            if key in self._commands:
                raise LocalProtocolError(f"{self.tag}: {key} has a handler already")
            self._commands[key] = Command(
                key, handler, refuse, is_query=is_query, is_note=is_note, is_authorised=authorised
            )
            return handler

        return register

    @property
    def has_listener(self) -> bool:
        """Whether a process subscribes to the status stream."""
        return self._streams is not None and self._streams.status.is_connected

    @property
    def max_status_bytes(self) -> int:
        """How long the value of a status event or a result may be; 0 while it is not bound."""
        return 0 if self._streams is None else max(0, self._streams.status.max_message_length - EVENT_BYTES)

    def status(self, key: str, value: object = None, *, correlation_id: int = 0) -> bool:
        """Publish a status event, about the request of `correlation_id` if any; False without room or subscriber.

        >>> service.status("progress", 0.5)          # doctest: +SKIP
        """
        if not KEY.fullmatch(key):
            raise LocalProtocolError(f"status {key!r}: a key has letters, digits, '.', '_' and '-'")
        return self._publish(key, value, correlation_id)

    def after_answer(self, action: Callable[[], object]) -> None:
        """From inside a handler: have `action` called once the result has left, such as to end the process."""
        self._afterwards.append(action)

    # --- the host's side

    def bind(self, client: aeron.Client, *, patiently: bool = False) -> None:
        """Open the streams at a media driver. Raises TransportError when one cannot be opened.

        `patiently`: that is logged instead, and `invoke` tries again, for hosts that have more important work.
        """
        self.unbind()
        self._client, self._is_patient = client, patiently
        self._open(self._clock.monotonic_ns())

    def unbind(self) -> None:
        """Close the streams; commands that were not echoed yet are forgotten, as if they had come too late."""
        streams, self._streams, self._client = self._streams, None, None
        self._inbox.clear()
        self._outbox.clear()
        self._waiting.clear()
        if streams is not None:
            self._counts["from_before"] += streams.from_before
            streams.close()

    def invoke(self) -> int:
        """One turn: never blocks, returns the work that was done for this service; traffic of others is none.

        Raises TransportError when the media driver is gone, unless it was bound patiently.
        """
        now_ns = self._clock.monotonic_ns()
        if self._streams is None:
            while self._afterwards:  # their answers were dropped with the streams
                self._afterwards.popleft()()
            if self._client is None or now_ns < self._bind_ns:
                return 0
        try:
            if self._streams is None:
                self._open(now_ns)
            return 0 if self._streams is None else self._turn(self._streams, now_ns)
        except (TransportError, Closed) as error:
            if not self._is_patient:
                raise
            self._lose(str(error), now_ns)
            return 0

    # --- inside: the turn

    def _turn(self, streams: ServiceStreams, now_ns: int) -> int:
        work = self._flush(streams, now_ns)
        if len(self._waiting) < WAITING_LIMIT and not self._inbox:
            work += streams.poll(FRAGMENT_LIMIT, now_ns) >= FRAGMENT_LIMIT  # there is more to read
        while self._inbox and self._streams is streams:
            work += 1
            accepted = self._read(self._inbox.popleft(), now_ns)
            if accepted is None:
                continue
            if not accepted.command.is_query:
                self._waiting.append(accepted)
            elif self._keep_echo(streams, accepted):
                self._run(accepted)
        while self._waiting and self._streams is streams and self._is_decided(streams, self._waiting[0], now_ns):
            work += 1
        if self._refusals:
            self._log_refusals(now_ns)
        if now_ns >= self._alive_ns:
            self._alive_ns = now_ns + self.config.alive_period_ms * 1_000_000
            self._publish(events.ALIVE, self._alive(), is_droppable=True)
        while self._afterwards and not (self._outbox and self._outbox[0][1]):
            work += 1
            self._afterwards.popleft()()
        return work

    def _read(self, data: bytes, now_ns: int) -> _Accepted | None:
        try:
            message = self._schema.decode(data)
            assert isinstance(message, EventMessage)
            if not message.key.isascii():
                raise LocalProtocolError("a key that is not ASCII")
        except (DecodeError, LocalProtocolError):
            self._counts["malformed"] += 1
            return None
        try:
            command = self._commands.get(message.key)
            if command is None:
                raise Unacceptable(f"{message.key!r:.80} is no command of it; it knows {', '.join(self.keys)}")
            if len(message.value) > self.config.max_value_bytes:
                most = f"at most {self.config.max_value_bytes} are accepted (control.max_value_bytes)"
                raise Unacceptable(f"a value of {len(message.value)} bytes, {most}")
            if not command.is_query and not self.config.allows(message.key):
                raise Unacceptable(
                    f"{message.key} changes its state and may not come over the network; control.allow_remote lists "
                    "what may"
                )
            bare = self._authority.checked(message, self._clock.realtime_ns()) if command.is_authorised else message
            arguments = command.read(bare)
            if limit := self._echo_limit(data):
                raise Unacceptable(f"too many bytes: its echo has {len(data)}, the status stream takes {limit}")
            if not command.is_note:
                self._spend_allowance(now_ns)
        except Unacceptable as reason:
            if command is not None and command.is_authorised:
                self._note_refusal(message, _short(str(reason)), now_ns)
            self._reject(message, str(reason))
            return None
        return _Accepted(data, message, command, arguments, now_ns + self.config.command_timeout_ms * 1_000_000)

    def _echo_limit(self, data: bytes) -> int:
        """What the status stream takes, if that is less; else 0."""
        limit = 0 if self._streams is None else self._streams.status.max_message_length
        return limit if len(data) > limit else 0

    def _spend_allowance(self, now_ns: int) -> None:
        """Only commands that are otherwise acceptable count: junk takes nothing from them. Raises Unacceptable."""
        limit = self.config.commands_per_s
        self._allowance = min(limit, self._allowance + (now_ns - self._allowed_ns) * limit / 1e9)
        self._allowed_ns = now_ns
        if self._allowance < 1:
            self._counts["over_rate"] += 1
            raise Unacceptable(f"more than {limit} commands a second (control.commands_per_s); it was not run")
        self._allowance -= 1

    def _keep_echo(self, streams: ServiceStreams, accepted: _Accepted) -> bool:
        """Echo a query now, or as soon as there is a subscriber with room; False where too many wait for that."""
        result = None if self._outbox else streams.status.offer(accepted.data)
        if not result and accepted.command.is_note:
            return True
        if not result:
            if len(self._outbox) >= OUTBOX_LIMIT:
                self._refuse_unechoed(accepted)
                return False
            self._outbox.append((accepted.data, None))
        return True

    def _is_decided(self, streams: ServiceStreams, accepted: _Accepted, now_ns: int) -> bool:
        """Echo and run, or refuse what could not be echoed in time; False while it waits."""
        is_echoed = not self._outbox and bool(streams.status.offer(accepted.data))
        if not is_echoed and now_ns < accepted.deadline_ns:
            return False
        self._waiting.popleft()
        if is_echoed:
            self._run(accepted)
        else:
            self._refuse_unechoed(accepted)
        return True

    def _refuse_unechoed(self, accepted: _Accepted) -> None:
        self._counts["unechoed"] += 1
        self._reject(accepted.message, "the status stream had no subscriber with room for its echo; it was not run")

    def _run(self, accepted: _Accepted) -> None:
        self._counts["accepted"] += 1
        key, correlation_id = accepted.message.key, accepted.message.correlation_id
        if not accepted.command.is_query:
            self._refusals.pop(key, None)
            sender, now_ns = self._sender_of(accepted.message), self._clock.monotonic_ns()
            self._audit(now_ns, "command", key, correlation_id, sender, value=_shown(accepted.arguments))
        try:
            value = accepted.command.handler(*accepted.arguments)
            self._publish(events.RESULT + key, value, correlation_id)
        except Exception as error:
            self._counts["failed"] += 1
            self._log.warning("command_failed", key=key, correlation_id=correlation_id, error=repr(error))
            words = str(error) if isinstance(error, TensorPoolError) else f"{type(error).__name__}: {error}"
            self._publish(events.ERROR + key, _short(words), correlation_id)

    def _audit(self, now_ns: int, event: str, key: str, number: int, sender: dict[str, object], **more: object) -> None:
        """A command that changes the service, with the process that sent it, where that said so."""
        self._audit_log.line(now_ns, event, key=key, correlation_id=number, **sender, **more)

    def _sender_of(self, message: EventMessage) -> dict[str, object]:
        return self._senders.pop(message.correlation_id, UNKNOWN)

    def _note_refusal(self, message: EventMessage, reason: str, now_ns: int) -> None:
        """Log it in a moment: a commander learns by a refusal that it has to sign, and sends the command again."""
        sender = self._sender_of(message)
        known = self._refusals.pop(message.key, None)
        if known is not None and (known.sender is not UNKNOWN or sender is UNKNOWN):
            self._log_refusal(known, now_ns)
        self._refusals[message.key] = _Refused(
            message.key, message.correlation_id, sender, reason, now_ns + SIGN_WITHIN_NS
        )

    def _log_refusal(self, refused: _Refused, now_ns: int) -> None:
        number = refused.correlation_id
        self._audit(now_ns, "command_refused", refused.key, number, refused.sender, reason=refused.reason)

    def _log_refusals(self, now_ns: int) -> None:
        for refused in [it for it in self._refusals.values() if now_ns >= it.due_ns]:
            del self._refusals[refused.key]
            self._log_refusal(refused, now_ns)

    def _on_sender(self, declaration: str) -> None:
        """Who sends the command that follows. Raises LocalProtocolError."""
        try:
            sender = msgspec.json.decode(declaration, type=Sender)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise LocalProtocolError(f"{SENDER} takes JSON: {error}") from None
        self._senders[sender.correlation_id] = sender.fields()
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)

    def _reject(self, message: EventMessage, reason: str) -> None:
        self._counts["rejected"] += 1
        key = message.key if KEY.fullmatch(message.key) else "?"
        self._publish(events.REJECTED + key, _short(reason), message.correlation_id)

    # --- inside: the status stream

    def _publish(self, key: str, value: object, correlation_id: int = 0, *, is_droppable: bool = False) -> bool:
        now_ns = self._clock.realtime_ns()
        message = make_event(self.tag, key, value, correlation_id=correlation_id, timestamp_ns=now_ns)
        data = self._schema.encode(message)
        streams = self._streams
        if streams is None:
            return False
        if len(data) > streams.status.max_message_length:
            limit = streams.status.max_message_length
            raise LocalProtocolError(f"a status event of {len(data)} bytes; the status stream takes {limit}")
        if not self._outbox:
            result = streams.status.offer(data)
            if result or result is aeron.OfferResult.NOT_CONNECTED:
                return bool(result)
        if is_droppable or len(self._outbox) >= OUTBOX_LIMIT:
            self._counts["status_dropped"] += 1
            return False
        self._outbox.append((data, self._clock.monotonic_ns() + PATIENCE_NS))
        return True

    def _flush(self, streams: ServiceStreams, now_ns: int) -> int:
        sent = 0
        while self._outbox:
            data, deadline_ns = self._outbox[0]
            if not streams.status.offer(data):
                if deadline_ns is None or now_ns < deadline_ns:
                    break
                self._counts["status_dropped"] += 1
            self._outbox.popleft()
            sent += 1
        return sent

    def _alive(self) -> Alive:
        return Alive(service=self.name, instance=self.instance, pid=os.getpid(), state=self._state, version=version())

    # --- inside: the connection

    def _open(self, now_ns: int) -> None:
        assert self._client is not None
        self._bind_ns = now_ns + BIND_AGAIN_NS
        try:
            self._streams = ServiceStreams(self._client, self.config, self._filter, self._inbox.append, now_ns)
        except (TransportError, Closed) as error:
            if not self._is_patient:
                raise
            self._log_trouble(str(error))
            return
        self._alive_ns = 0
        self._trouble = ""

    def _lose(self, words: str, now_ns: int) -> None:
        client = self._client
        self.unbind()
        self._client, self._bind_ns = client, now_ns + BIND_AGAIN_NS
        self._log_trouble(words)

    def _log_trouble(self, words: str) -> None:
        if words != self._trouble:
            self._trouble = words
            self._log.warning("control_unavailable", error=words)


@functools.cache
def version() -> str:
    """Of tensorpool."""
    return metadata.version(DISTRIBUTION)


def _shown(arguments: tuple[object, ...]) -> str | None:
    """The value of a command, for the audit log."""
    return None if not arguments or arguments[0] is None else printable(str(arguments[0]), MAX_SHOWN)


def _short(words: str) -> str:
    """A reason that fits into one fragment, whatever a peer or a handler put into it."""
    data = words.encode("utf-8", "backslashreplace")
    is_long = len(data) > MAX_REASON_BYTES
    return data[:MAX_REASON_BYTES].decode("utf-8", "ignore") + "…" * is_long
