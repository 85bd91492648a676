# SPDX-License-Identifier: Apache-2.0
"""Decodes the messages of a subscription and calls the method that each kind belongs to.

Streams may be shared by all schemas and directions: a message of a kind that was not added is skipped by its header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol

from tensorpool._core import MessageFilter, MessageInfo
from tensorpool.errors import DecodeError
from tensorpool.wire import Message, decode, peek_header
from tensorpool.wire.sbe import Schema

_HEADER_BYTES: Final = 8
_KIND: Final = struct.Struct("<HH")  # template id and schema id: bytes 2 to 5 of the header

type OnMessage[M] = Callable[[M, MessageInfo], object]


class Identified(Protocol):
    """A kind of message, ours or not of the codec, by the ids in its header."""

    SCHEMA_ID: ClassVar[int]
    TEMPLATE_ID: ClassVar[int]


class MessageAdapter:
    """Dispatches by schema and template.

    >>> adapter = MessageAdapter(on_malformed=lambda data, error: print(error))
    >>> adapter.add(ShmPoolAnnounce, conductor.on_shm_pool_announce)    # doctest: +SKIP
    >>> subscription.poll(adapter.on_message, 10)                       # doctest: +SKIP

    `on_malformed` gets every message that is cut short or that `decode`, also one in a handler, refuses;
    `on_foreign` every message of another kind. What a handler raises besides DecodeError leaves `on_message`.
    """

    def __init__(
        self,
        on_malformed: Callable[[bytes, DecodeError], object],
        *,
        on_foreign: Callable[[bytes], object] | None = None,
    ) -> None:
        self._on_malformed = on_malformed
        self._on_foreign = on_foreign
        self._routes: dict[bytes, tuple[Callable[[bytes], Any], OnMessage[Any]]] = {}

    def add[M: Message](self, kind: type[M], handler: OnMessage[M], schema: Schema | None = None) -> None:
        """Call `handler` with each message of this kind; `schema` where it has another id than usual."""
        self._routes[_key(kind, schema)] = decode if schema is None else schema.decode, handler

    def add_undecoded(self, kind: type[Identified], handler: OnMessage[bytes], schema: Schema | None = None) -> None:
        """Call `handler` with the bytes of each message of this kind, of any length from the header's on."""
        self._routes[_key(kind, schema)] = _complete_header, handler

    def make_filter(self, max_bytes: int) -> MessageFilter:
        """For streams that strangers can reach: poll with it, and memory is taken for messages of these kinds only."""
        kinds = [(schema_id, template_id) for template_id, schema_id in map(_KIND.unpack, self._routes)]
        return MessageFilter(kinds, max_bytes)

    def on_message(self, data: bytes, info: MessageInfo) -> None:
        """Handle one message; pass this to `Subscription.poll`."""
        route = self._routes.get(data[2:6])
        try:
            if route is not None:
                decoder, handler = route
                handler(decoder(data), info)
            elif len(data) < _HEADER_BYTES:
                peek_header(data)
            elif self._on_foreign is not None:
                self._on_foreign(data)
        except DecodeError as error:
            self._on_malformed(data, error)


def has_kind(data: bytes, kind: type[Identified]) -> bool:
    """Whether the header of a message names this kind; the rest may be malformed."""
    return data[2:6] == _key(kind, None)


def _key(kind: type[Identified], schema: Schema | None) -> bytes:
    return _KIND.pack(kind.TEMPLATE_ID, kind.SCHEMA_ID if schema is None else schema.id)


def _complete_header(data: bytes) -> bytes:
    if len(data) < _HEADER_BYTES:
        peek_header(data)
    return data
