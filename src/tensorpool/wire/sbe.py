# SPDX-License-Identifier: Apache-2.0
"""SBE messages: schema documents in, message classes out.

Every message is a frozen struct with the schema's names in snake_case. Absent optional fields are None,
groups are tuples, text is str (any bytes survive a round trip), binary is bytes. Nothing that is decoded
aliases the input.

Decoding accepts exactly one message and raises DecodeError for anything else; encoding raises
LocalProtocolError for what the schema cannot carry. A template may have two layouts, which differ in their block
length: dialects. Wire §16; decisions A6, A11, A22, K9.
"""

from __future__ import annotations

import struct
from collections.abc import Buffer, Mapping
from enum import IntEnum
from importlib import resources
from types import GenericAlias
from typing import Any, ClassVar, Self, cast

import msgspec

from tensorpool.errors import DecodeError, DecodeFault, LocalProtocolError
from tensorpool.wire.codec import BlockCodec, DataCodec, GroupCodec, TailCodec, check_block_length, too_short
from tensorpool.wire.schema import Block, Document, Enumeration, Field, Group, MessageType, parse

_HEADER = struct.Struct("<4H")


class MessageHeader(msgspec.Struct, frozen=True):
    """The eight bytes in front of every message."""

    block_length: int
    template_id: int
    schema_id: int
    version: int


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages.

    >>> decode(FrameDescriptor(stream_id=10000, epoch=7, seq=5).encode())
    FrameDescriptor(stream_id=10000, epoch=7, seq=5, timestamp_ns=None, meta_version=None, trace_id=None)
    """

    SCHEMA_ID: ClassVar[int]
    SCHEMA_VERSION: ClassVar[int]
    TEMPLATE_ID: ClassVar[int]
    BLOCK_LENGTH: ClassVar[int]
    _codec: ClassVar[BlockCodec]
    _header: ClassVar[bytes]

    def encode(self) -> bytes:
        """The message with its header. Raises LocalProtocolError for a value that the schema cannot carry."""
        parts = [self._header]
        self._codec.encode(self, parts)
        return b"".join(parts)

    def encode_body(self) -> bytes:
        """The message without its header, as it lies in shared memory. Raises like `encode`."""
        parts: list[bytes] = []
        self._codec.encode(self, parts)
        return b"".join(parts)

    def encode_into(self, buffer: Buffer, offset: int = 0) -> int:
        """Write `encode()` at `offset` of a writable buffer and return its length.

        Raises LocalProtocolError, with the buffer untouched, when it does not fit.
        """
        encoded = self.encode()
        target = memoryview(buffer).cast("B")
        end = offset + len(encoded)
        if offset < 0 or end > len(target):
            size = f"{type(self).__name__} takes {len(encoded)} bytes"
            raise LocalProtocolError(f"{size}: it does not fit at offset {offset} of {len(target)}")
        target[offset:end] = encoded
        return len(encoded)

    @classmethod
    def decode_body(cls, buffer: Buffer) -> Self:
        """Read a message without header from exactly the given bytes. Raises DecodeError."""
        return cast(Self, _decode_body(cls, _as_bytes(buffer), 0, cls.BLOCK_LENGTH))


class Schema(msgspec.Struct, frozen=True):
    """One schema id: its messages by template id, and every type that users see by name.

    `dialects` are the other layouts of some templates, by template id and block length.
    """

    id: int
    version: int
    is_extensible: bool
    messages: dict[int, type[Message]]
    dialects: dict[tuple[int, int], type[Message]]
    types: dict[str, type]
    documents: tuple[Document, ...]

    def with_id(self, id: int) -> Schema:
        """The same messages under another schema id, for deployments that number a schema differently.

        >>> commands = event.schema.with_id(906)
        >>> commands.decode(commands.encode(message)) == message
        True
        """
        if not 0 <= id <= 0xFFFF:
            raise LocalProtocolError(f"schema id {id}: expected uint16 from 0 to 65535")
        return msgspec.structs.replace(self, id=id)

    def encode(self, message: Message) -> bytes:
        """The message with this schema's id in its header. Raises LocalProtocolError."""
        if type(message) not in self.layouts(message.TEMPLATE_ID):
            raise LocalProtocolError(f"{type(message).__name__} is not a message of schema {self.id}")
        header = _HEADER.pack(message.BLOCK_LENGTH, message.TEMPLATE_ID, self.id, self.version)
        return header + message.encode_body()

    def decode(self, buffer: Buffer) -> Message:
        """Read one message of this schema. Raises DecodeError."""
        return decode_any({self.id: self}, buffer)

    def layouts(self, template_id: int) -> tuple[type[Message], ...]:
        """The classes of a template: the specification's first, then other dialects."""
        own = self.messages.get(template_id)
        return () if own is None else (own, *(cls for key, cls in self.dialects.items() if key[0] == template_id))


def load(*names: str, module: str, is_extensible: bool = False) -> Schema:
    """Compile the named documents of one schema id into classes that belong to `module`.

    `is_extensible` messages may come with a longer block than ours, whose surplus is skipped. All others must
    match to the byte, because the specifications change layouts without changing the version (A6). A message of a later
    document that has the template of an earlier one is another layout of it, known by its block length (K9).
    """
    folder = resources.files(__package__) / "schemas"
    documents = tuple(parse((folder / name).read_text("utf-8")) for name in names)
    ((id, version),) = {(document.id, document.version) for document in documents}
    compiler = _Compiler(module, id, version)
    for document in documents:
        for enum in document.enums:
            compiler.add_enum(enum)
        for message in document.messages:
            compiler.add_message(message)
        compiler.end_document()
    messages = (*compiler.messages.values(), *compiler.dialects.values())
    types = compiler.enums | compiler.entries | {cls.__name__: cls for cls in messages}
    return Schema(id, version, is_extensible, compiler.messages, compiler.dialects, types, documents)


def peek_header(buffer: Buffer) -> MessageHeader:
    """The header alone, to route a message before decoding it. Raises DecodeError when it is cut short."""
    data = _as_bytes(memoryview(buffer)[: _HEADER.size])
    if len(data) < _HEADER.size:
        raise too_short("message header", 0, _HEADER.size, len(data))
    return MessageHeader(*_HEADER.unpack(data))


def decode_any(schemas: Mapping[int, Schema], buffer: Buffer) -> Message:
    """Read one message of any of `schemas`, which are keyed by id. Raises DecodeError."""
    data = _as_bytes(buffer)
    if len(data) < _HEADER.size:
        raise too_short("message header", 0, _HEADER.size, len(data))
    block_length, template_id, schema_id, version = _HEADER.unpack_from(data)
    schema = schemas.get(schema_id)
    if schema is None:
        expected = ", ".join(map(str, schemas))
        raise DecodeError(f"schema {schema_id} is unknown, expected {expected}", 4, DecodeFault.SCHEMA)
    cls = schema.messages.get(template_id)
    if cls is None:
        raise DecodeError(f"schema {schema_id} has no template {template_id}", 2, DecodeFault.TEMPLATE)
    if version != schema.version:
        what = f"{cls.__name__}: schema version {version}, expected {schema.version}"
        raise DecodeError(what, 6, DecodeFault.VERSION)
    if block_length != cls.BLOCK_LENGTH:
        known = schema.dialects.get((template_id, block_length))
        if known is None:
            lengths = [layout.BLOCK_LENGTH for layout in schema.layouts(template_id)]
            check_block_length(cls.__name__, block_length, lengths, schema.is_extensible, 0)
        else:
            cls = known
    return _decode_body(cls, data, _HEADER.size, block_length)


def _decode_body(cls: type[Message], data: bytes, at: int, block_length: int) -> Message:
    message, end = cls._codec.decode(data, at, block_length)
    if end != len(data):
        what = f"{cls.__name__}: {len(data) - end} bytes after its end"
        raise DecodeError(what, end, DecodeFault.TRAILING_BYTES)
    return cast(Message, message)


def _as_bytes(buffer: Buffer) -> bytes:
    """A private copy: a peer who still writes to the buffer cannot change what was already checked."""
    if type(buffer) is bytes:
        return buffer
    view = memoryview(buffer)
    if view.itemsize != 1:
        raise TypeError(f"a message is read from bytes, not from items of format {view.format!r}")
    return view.tobytes()


class _Compiler:
    """Makes the classes of one schema, with their codecs."""

    def __init__(self, module: str, schema_id: int, version: int) -> None:
        self.enums: dict[str, type[IntEnum]] = {}
        self.entries: dict[str, type[msgspec.Struct]] = {}
        self.messages: dict[int, type[Message]] = {}
        self.dialects: dict[tuple[int, int], type[Message]] = {}
        self._earlier: frozenset[int] = frozenset()  # templates of the documents before
        self._module = module
        self._schema_id = schema_id
        self._version = version
        self._entry_blocks: dict[str, Block] = {}

    def add_enum(self, enum: Enumeration) -> None:
        if not enum.is_bool and enum.name not in self.enums:
            define: Any = IntEnum  # type checkers know its functional form for literals only
            self.enums[enum.name] = define(enum.name, enum.members, module=self._module)

    def add_message(self, message: MessageType) -> None:
        length, template_id = message.block.length, message.template_id
        is_dialect = template_id in self._earlier and length != self.messages[template_id].BLOCK_LENGTH
        if (template_id, length) in self.dialects or (template_id in self.messages and not is_dialect):
            raise ValueError(f"two messages of schema {self._schema_id} have template {template_id}")
        layout = f"Schema {self._schema_id}, template {template_id}, block of {length} bytes."
        namespace = {
            "__doc__": f"{message.description}\n\n{layout}" if message.description else layout,
            "SCHEMA_ID": self._schema_id,
            "SCHEMA_VERSION": self._version,
            "TEMPLATE_ID": template_id,
            "BLOCK_LENGTH": length,
            "_header": _HEADER.pack(length, template_id, self._schema_id, self._version),
        }
        tail = self._tail(message.name, message.block)
        cls = cast(type[Message], self._define(message.name, message.block, Message, namespace))
        cls._codec = BlockCodec(message.name, message.block, cls, self.enums, tail)
        if is_dialect:
            self.dialects[template_id, length] = cls
        else:
            self.messages[template_id] = cls

    def end_document(self) -> None:
        self._earlier = frozenset(self.messages)

    def _tail(self, path: str, block: Block) -> dict[str, TailCodec]:
        tail: dict[str, TailCodec] = {}
        for group in block.groups:
            group_path = f"{path}.{group.name}"
            entry_tail = self._tail(group_path, group.entry)
            cls = self._entry_class(group)
            entry = BlockCodec(group_path, group.entry, cls, self.enums, entry_tail)
            tail[group.name] = GroupCodec(group_path, group, cls, entry)
        for data in block.data:
            tail[data.name] = DataCodec(f"{path}.{data.name}", data)
        return tail

    def _entry_class(self, group: Group) -> type[msgspec.Struct]:
        """The class of a group's entries: groups of one name must have one shape, and share the class."""
        name = group.class_name
        if self._entry_blocks.setdefault(name, group.entry) != group.entry:
            raise ValueError(f"two different groups would both hold {name}")
        if name not in self.entries:
            namespace = {"__doc__": f"An entry of `{group.name}`, block of {group.entry.length} bytes."}
            self.entries[name] = self._define(name, group.entry, msgspec.Struct, namespace)
        return self.entries[name]

    def _define(
        self, name: str, block: Block, base: type[msgspec.Struct], namespace: dict[str, Any]
    ) -> type[msgspec.Struct]:
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for field in block.visible:
            if field.nulls:
                fields.append((field.name, self._type_of(field) | None, None))
            elif field.name.startswith("pad_"):
                fields.append((field.name, int, 0))
            else:
                fields.append((field.name, self._type_of(field)))
        for group in block.groups:
            entries = GenericAlias(tuple, (self.entries[group.class_name], ...))
            fields.append((group.name, entries, ()))
        fields += [(data.name, str, "") if data.is_text else (data.name, bytes, b"") for data in block.data]
        namespace |= {constant.upper(): value for constant, value in block.constants.items()}
        return msgspec.defstruct(
            name, fields, bases=(base,), namespace=namespace, module=self._module, frozen=True, kw_only=True
        )

    def _type_of(self, field: Field) -> Any:
        if field.length is not None:
            return tuple[int, ...]
        if field.enum is None:
            return int
        return bool if field.enum.is_bool else self.enums[field.enum.name]
