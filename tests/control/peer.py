# SPDX-License-Identifier: Apache-2.0
"""A peer of any service that knows nothing but the wire: the codec, Aeron, and bytes that no codec would write.

It publishes commands and keeps a transcript of the status stream, and of the control stream where a test wants it. A
service reads one publisher's commands in order, so that an answer to a later one proves that an earlier one got none.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from tensorpool import aeron
from tensorpool.control import ControlConfig, authorisation
from tensorpool.wire import event
from tensorpool.wire.event import EventMessage, Format
from tests.support.processes import wait_until

IPC: Final = "aeron:ipc?term-length=4m"
NULL_32: Final = 0xFFFFFFFF
NULL_64: Final = 0xFFFFFFFFFFFFFFFF
CHANGING: Final = ("drain", "log-level", "pause", "reload", "resume")

_stream_ids = itertools.count(51_000, 10)  # many tests share a media driver


def new_endpoints() -> dict[str, Any]:
    """Keys of [control] of a test's own, under which a commander waits for a minute."""
    stream_id = next(_stream_ids)
    return {"control_stream_id": stream_id, "status_stream_id": stream_id + 1, "command_timeout_ms": 60_000}


def raw_event(
    *,
    header: tuple[int, int, int, int] = (40, 1, 905, 1),
    correlation_id: int = 1,
    format: int = 0,
    ref: tuple[int, int, int] = (NULL_32, NULL_64, NULL_64),
    tag: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    more: bytes = b"",
    lengths: tuple[int, int, int] | None = None,
) -> bytes:
    """An event byte by byte; `more` goes behind the block's fields, `lengths` replace the true ones."""
    block = struct.pack("<q q b 3x I Q Q", 5, correlation_id, format, *ref)
    claimed = lengths or (len(tag), len(key), len(value))
    parts = (struct.pack("<I", length) + data for length, data in zip(claimed, (tag, key, value), strict=True))
    return struct.pack("<4H", *header) + block + more + b"".join(parts)


class EventPeer:
    """Commands services by the wire alone.

    >>> with EventPeer(aeron_dir, control=(IPC, 1400), status=(IPC, 1401)) as peer:        # doctest: +SKIP
    ...     sent = peer.command("service:driver:driver-01", "ping")
    ...     assert peer.echo_of(sent)

    `turn` is called while the peer waits, for services that live on the test's own thread.
    """

    def __init__(
        self,
        aeron_dir: str,
        *,
        control: tuple[str, int],
        status: tuple[str, int],
        schema_id: int = 905,
        exclusive: bool = False,
        turn: Callable[[], object] = lambda: None,
    ) -> None:
        self.received: list[bytes] = []  # the status stream, as bytes
        self.turn = turn
        self.aeron_dir = aeron_dir
        self._schema = event.schema.with_id(schema_id)
        self._client = aeron.connect(aeron_dir)
        self._status = self._client.add_subscription(*status)
        self._control = self._client.add_publication(*control, exclusive=exclusive)
        self.until(lambda: self._control.has_room, "the control stream has a subscriber")

    def close(self) -> None:
        self._client.close()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            self.turn()
            self._status.poll(lambda data, _: self.received.append(data), 100)
            return condition()

        wait_until(holds, what)

    # --- saying

    def say(self, data: bytes) -> bytes:
        """Publish bytes on the control stream."""
        self.until(lambda: self._control.offer(data), "the control stream takes the message")
        return data

    def command(
        self,
        tag: str,
        key: str,
        value: bytes = b"",
        format: Format = Format.NOTHING,
        *,
        correlation_id: int | None = None,
        **fields: Any,
    ) -> bytes:
        """Publish a command; its bytes. Those that change one of our services are signed with this account's key."""
        number = secrets.randbits(62) if correlation_id is None else correlation_id
        fields.setdefault("timestamp_ns", time.time_ns() if key in CHANGING else 7)
        message = EventMessage(correlation_id=number, format=format, tag=tag, key=key, value=value, **fields)
        signer = authorisation.signer(ControlConfig()) if key in CHANGING else None
        return self.say(self._schema.encode(message if signer is None else signer.sign(message)))

    # --- hearing

    @property
    def events(self) -> list[EventMessage]:
        """The transcript, decoded: every message of the status stream has to be one."""
        return [self.read(data) for data in self.received]

    def read(self, data: bytes) -> EventMessage:
        message = self._schema.decode(data)
        assert isinstance(message, EventMessage)
        return message

    def hear(self, key: str, correlation_id: int = 0) -> EventMessage:
        """The first status event with this key and id."""

        def found() -> list[EventMessage]:
            return [one for one in self.events if one.key == key and one.correlation_id == correlation_id]

        self.until(found, f"{key} of {correlation_id} is received")
        return found()[0]

    def answer_to(self, sent: bytes, kind: str = "result") -> EventMessage:
        """What a service of ours says about a command."""
        message = self.read(sent)
        return self.hear(f"{kind}:{message.key}", message.correlation_id)

    def is_echoed(self, sent: bytes) -> bool:
        """Whether the very bytes were received on the status stream."""
        return sent in self.received

    def wait_for_echo(self, sent: bytes) -> None:
        self.until(lambda: self.is_echoed(sent), "the command is echoed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
