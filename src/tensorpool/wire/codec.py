# SPDX-License-Identifier: Apache-2.0
"""Blocks, groups and var data: the parts of an SBE message, each with its bytes both ways.

    body   =  block  group*  data*                       block  =  fixed fields, packed, little-endian
    group  =  u16 blockLength  u16 numInGroup  entry*    entry  =  block  group*  data*
    data   =  u32 length  bytes

Reading checks every length and count against the bytes at hand before it builds anything from them, and
raises DecodeError. Writing raises LocalProtocolError for a value that the schema cannot carry.

A block compiles to one `struct` format and two expressions: one makes the object from the unpacked values,
the other packs it. They are fast because they explain nothing: when one fails, the fields are walked to find
out which value is to blame.
Wire §10.1, §16; decisions A4–A6, A13, A18, A19.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tensorpool.errors import DecodeError, DecodeFault, LocalProtocolError
from tensorpool.wire.schema import Block, Data, Enumeration, Field, Group

_GROUP = struct.Struct("<2H")
_LENGTH = struct.Struct("<I")
_MAX_ENTRIES = 65534  # A18: the all-ones count is SBE's null

_show = reprlib.Repr(maxstring=200, maxother=200, maxlong=60).repr  # values may be megabytes

type Enums = Mapping[str, type[IntEnum]]


class BlockCodec:
    """A block with the groups and data behind it: the body of a message, or one entry of a group."""

    def __init__(self, path: str, block: Block, cls: type, enums: Enums, tail: Mapping[str, TailCodec]) -> None:
        self.path = path
        self.length = block.length
        self.min_size = block.length + 4 * len(tail)  # empty groups and empty data take four bytes each
        self._block = block
        self._tail = tuple(tail.items())
        self._readers = tuple(part.decode for part in tail.values())
        fixed = struct.Struct(block.format)
        self._unpack = fixed.unpack_from
        self._build = _build_expression(block, cls, enums, tuple(tail))
        self._pack = _pack_expression(block, fixed)

    def decode(self, data: bytes, at: int, block_length: int) -> tuple[Any, int]:
        """The object at `at`, whose block has `block_length` bytes on the wire, and where it ends."""
        position = at + block_length
        if position > len(data):
            raise too_short(self.path, at, block_length, len(data))
        fixed = self._unpack(data, at)
        tail = []
        for read in self._readers:
            value, position = read(data, position)
            tail.append(value)
        try:
            return self._build(fixed, tail), position
        except LookupError:
            raise self._refused(fixed, at) from None

    def encode(self, message: Any, parts: list[bytes]) -> None:
        """Append the bytes of `message` to `parts`."""
        try:
            parts.append(self._pack(message))
        except (struct.error, LookupError, TypeError, OverflowError) as error:
            raise self._unencodable(message, error) from None
        for name, part in self._tail:
            part.encode(getattr(message, name), parts)

    def _refused(self, fixed: tuple[int, ...], at: int) -> DecodeError:
        """The error for the first field whose value is no member of its enum or above its maximum."""
        field, value = next(
            (field, fixed[index]) for field, index in _indexed(self._block) if not field.reads(fixed[index])
        )
        what = f"{self.path}.{field.name}: {value} is refused, expected {field.accepted}"
        return DecodeError(what, at + self._block.offset_of(field), DecodeFault.VALUE, field.name)

    def _unencodable(self, message: object, error: Exception) -> LocalProtocolError:
        for field in self._block.visible:
            value = getattr(message, field.name)
            if not field.accepts(value):
                return LocalProtocolError(f"{self.path}.{field.name} = {_show(value)}: expected {field.accepted}")
        return LocalProtocolError(f"{self.path}: {error}")


class GroupCodec:
    """A repeating group: a tuple of entries."""

    def __init__(self, path: str, group: Group, cls: type, entry: BlockCodec) -> None:
        self.path = path
        self._name = group.name
        self._is_extensible = group.is_extensible
        self._cls = cls
        self._entry = entry

    def decode(self, data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
        entry = self._entry
        position = at + _GROUP.size
        if position > len(data):
            raise too_short(self.path, at, _GROUP.size, len(data), self._name)
        block_length, count = _GROUP.unpack_from(data, at)
        if block_length != entry.length:
            check_block_length(self.path, block_length, [entry.length], self._is_extensible, at)
        if count > _MAX_ENTRIES:
            what = f"{self.path}: {count} entries, at most {_MAX_ENTRIES} are allowed"
            raise DecodeError(what, at + 2, DecodeFault.VALUE, self._name)
        least = count * (entry.min_size - entry.length + block_length)
        if position + least > len(data):
            what = f"{self.path}: {count} entries need at least {least} bytes, {len(data) - position} left"
            raise DecodeError(what, at + 2, DecodeFault.TRUNCATED, self._name)
        entries = []
        for _ in range(count):
            value, position = entry.decode(data, position, block_length)
            entries.append(value)
        return tuple(entries), position

    def encode(self, entries: object, parts: list[bytes]) -> None:
        if not isinstance(entries, (tuple, list)):
            raise LocalProtocolError(f"{self.path} = {_show(entries)}: expected a tuple of {self._cls.__name__}")
        if len(entries) > _MAX_ENTRIES:
            what = f"{self.path}: {len(entries)} entries, at most {_MAX_ENTRIES} are allowed"
            raise LocalProtocolError(what)
        parts.append(_GROUP.pack(self._entry.length, len(entries)))
        for index, entry in enumerate(entries):
            if not isinstance(entry, self._cls):
                name = f"{self._cls.__module__}.{self._cls.__name__}"
                raise LocalProtocolError(f"{self.path}[{index}] = {_show(entry)}: expected a {name}")
            self._entry.encode(entry, parts)


class DataCodec:
    """Var data: text as str, binary as bytes."""

    def __init__(self, path: str, data: Data) -> None:
        self.path = path
        self._name = data.name
        self._maximum = data.maximum
        self._is_text = data.is_text
        self._is_ascii = data.is_ascii

    def decode(self, data: bytes, at: int) -> tuple[str | bytes, int]:
        start = at + _LENGTH.size
        if start > len(data):
            raise too_short(self.path, at, _LENGTH.size, len(data), self._name)
        (length,) = _LENGTH.unpack_from(data, at)
        end = start + length
        if length > self._maximum:
            what = f"{self.path}: {length} bytes, at most {self._maximum} are allowed"
            raise DecodeError(what, at, DecodeFault.VALUE, self._name)
        if end > len(data):
            raise too_short(self.path, start, length, len(data), self._name)
        if self._is_text:
            # A13: text is opaque. Bytes that are not UTF-8 become lone surrogates, which encode back to them.
            return str(data[start:end], "utf-8", "surrogateescape"), end
        return data[start:end], end

    def encode(self, value: object, parts: list[bytes]) -> None:
        encoded = self._as_bytes(value)
        if len(encoded) > self._maximum:
            what = f"{self.path}: {len(encoded)} bytes, at most {self._maximum} are allowed"
            raise LocalProtocolError(what)
        parts.append(_LENGTH.pack(len(encoded)))
        parts.append(encoded)

    def _as_bytes(self, value: object) -> bytes:
        if not self._is_text:
            if not isinstance(value, bytes):
                raise LocalProtocolError(f"{self.path} = {_show(value)}: expected bytes")
            return value
        if not isinstance(value, str) or (self._is_ascii and not value.isascii()):
            raise LocalProtocolError(f"{self.path} = {_show(value)}: expected {'ASCII ' * self._is_ascii}text")
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise LocalProtocolError(f"{self.path} = {_show(value)}: expected text that UTF-8 can carry") from None


type TailCodec = GroupCodec | DataCodec


def too_short(path: str, at: int, needed: int, size: int, field: str = "") -> DecodeError:
    """The error for an element at `at` that needs more bytes than a buffer of `size` has left."""
    what = f"{path}: {needed} bytes needed, {size - at} left"
    return DecodeError(what, at, DecodeFault.TRUNCATED, field)


def check_block_length(path: str, found: int, expected: Sequence[int], is_extensible: bool, at: int) -> None:
    """A6, K9: blocks match a known length to the byte, unless the specification allows fields after ours."""
    if found not in expected and not (is_extensible and found > expected[0]):
        known = " or ".join(map(str, expected))
        what = f"{path}: block length {found}, expected {known}{' or more' * is_extensible}"
        raise DecodeError(what, at, DecodeFault.BLOCK_LENGTH)


def _indexed(block: Block) -> list[tuple[Field, int]]:
    """The visible fields, each with the index of its first value in the unpacked block."""
    indexed, index = [], 0
    for field in block.visible:
        indexed.append((field, index))
        index += field.length or 1
    return indexed


def _build_expression(
    block: Block, cls: type, enums: Enums, tail: tuple[str, ...]
) -> Callable[[tuple[int, ...], list[Any]], Any]:
    """`lambda v, t: cls(stream_id=v[0], mode=mode[v[1]], payload_pools=t[0], …)`.

    Values that may be refused are looked up in a table: undefined ones raise LookupError.
    """
    names: dict[str, Any] = {"cls": cls}
    arguments = []
    for field, index in _indexed(block):
        value = f"v[{index}]"
        if field.length is not None:
            value = f"v[{index}:{index + field.length}]"
        elif field.enum:
            names[field.name] = _members(field.enum, enums) | dict.fromkeys(field.nulls)
            value = f"{field.name}[{value}]"
        elif field.maximum is not None:
            names[field.name] = range(field.maximum + 1)
            value = f"{field.name}[{value}]"
        elif field.nulls:
            value = f"None if {value} in {field.nulls} else {value}"
        arguments.append(f"{field.name}={value}")
    arguments += [f"{name}=t[{index}]" for index, name in enumerate(tail)]
    return eval(f"lambda v, t: cls({', '.join(arguments)})", names)  # type: ignore[no-any-return]


def _pack_expression(block: Block, fixed: struct.Struct) -> Callable[[Any], bytes]:
    """`lambda m: pack(m.stream_id, mode[m.mode], *m.dims, …)`.

    What must not be written turns into None or into too few values, which `pack` refuses just as it refuses
    a number out of range.
    """
    names: dict[str, Any] = {"pack": fixed.pack}
    arguments = []
    for field in block.visible:
        value = f"m.{field.name}"
        if field.length is not None:
            value = f"*({value} if len({value}) == {field.length} else ())"
        elif field.enum:
            null = {None: field.nulls[0]} if field.nulls else {}
            names[field.name] = {number: number for number in field.enum.members.values()} | null
            value = f"{field.name}[{value}]"
        elif field.maximum is not None:
            value = f"{value} if {value} <= {field.maximum} else None"
        elif field.nulls:
            value = f"{field.nulls[0]} if {value} is None else None if {value} in {field.nulls} else {value}"
        arguments.append(value)
    return eval(f"lambda m: pack({', '.join(arguments)})", names)  # type: ignore[no-any-return]


def _members(enum: Enumeration, enums: Enums) -> dict[int, Any]:
    kind = bool if enum.is_bool else enums[enum.name]
    return {number: kind(number) for number in enum.members.values()}
