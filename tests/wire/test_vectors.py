# SPDX-License-Identifier: Apache-2.0
"""Golden bytes: 292 messages that an encoder outside this project made from the specifications' schemas."""

from __future__ import annotations

import gzip
import json
import re
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tensorpool.wire import DecodeError, bridge, control, decode, discovery, driver

with gzip.open(Path(__file__).parent / "vectors" / "sbe.jsonl.gz", "rt", encoding="utf-8") as lines:
    VECTORS = [json.loads(line) for line in lines]
SCHEMAS = {
    "wire": control.schema,
    "driver": driver.schema,
    "bridge": bridge.schema,
    "discovery": discovery.schema,
}
END_BYTES = 250  # of a long message, where every byte is a cut

every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])


def snake_case(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def build(cls: type, fields: dict[str, Any]) -> Any:
    """The message that a vector's `fields` describe."""
    types = {field.name: field.type for field in msgspec.structs.fields(cls)}
    return cls(**{name: value_of(types[name], value) for name, value in named(fields)})


def named(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(snake_case(name), value) for name, value in fields.items()]


def value_of(kind: Any, value: Any) -> Any:
    kind = next((part for part in get_args(kind) if isinstance(part, type) and issubclass(part, IntEnum)), kind)
    match value:
        case str() if kind is bool:
            return value == "TRUE"
        case str() if isinstance(kind, type) and issubclass(kind, IntEnum):
            return kind[value]
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case {"tensorHeader": fields}:
            return build(control.TensorHeader, fields).encode()
        case [dict(), *_]:
            return tuple(build(get_args(kind)[0], entry) for entry in value)
        case list():
            return tuple(value)
        case _:
            return value


def message_class(vector: dict[str, Any]) -> Any:
    return SCHEMAS[vector["schema"]].types[vector["message"]]


def read(vector: dict[str, Any], data: bytes | bytearray | memoryview) -> Any:
    if vector["framing"] == "body":
        return message_class(vector).decode_body(data)
    return decode(data)


def refusal(vector: dict[str, Any], data: bytes) -> DecodeError:
    try:
        message = read(vector, data)
    except DecodeError as error:
        return error
    pytest.fail(f"{len(data)} of {len(vector['hex']) // 2} bytes were read as {message}")


def cuts(length: int) -> list[int]:
    """Every place of a short message; of a long one both ends, and about a hundred places between them.

    Each cut is read from the start, so all cuts of a long group would take seconds. The step is odd, so that cuts
    fall on every part of an entry.
    """
    middle = range(END_BYTES, length - END_BYTES, length // 100 | 1)
    return sorted({*range(min(END_BYTES, length)), *middle, *range(max(0, length - END_BYTES), length)})


@every_vector
def test_fields_encode_to_the_golden_bytes(vector: dict[str, Any]) -> None:
    """Encoding a vector's fields gives its bytes, in a new buffer and inside an existing one."""
    cls = message_class(vector)
    message = build(cls, vector["fields"])
    golden = bytes.fromhex(vector["hex"])
    if vector["framing"] == "body":
        assert message.encode_body() == golden
    else:
        assert message.encode() == golden
        buffer = bytearray(b"\xaa" * (len(golden) + 5))
        assert message.encode_into(buffer, 3) == len(golden)
        assert buffer == b"\xaa" * 3 + golden + b"\xaa" * 2
    identity = (cls.SCHEMA_ID, cls.TEMPLATE_ID, cls.SCHEMA_VERSION)
    assert identity == (vector["schemaId"], vector["templateId"], vector["schemaVersion"])


@every_vector
def test_golden_bytes_decode_to_the_fields(vector: dict[str, Any]) -> None:
    """Decoding a vector's bytes gives its fields, whatever kind of buffer holds them."""
    expected = build(SCHEMAS[vector["schema"]].types[vector["message"]], vector["fields"])
    golden = bytes.fromhex(vector["hex"])
    for buffer in golden, bytearray(golden), memoryview(golden), memoryview(bytearray(golden)).toreadonly():
        message = read(vector, buffer)
        assert message == expected
        assert type(message) is type(expected)


@every_vector
@pytest.mark.spec("WIRE-16-17")
def test_truncated_or_extended_golden_bytes_are_refused(vector: dict[str, Any]) -> None:
    """No prefix of a message is a message, nor is a message with anything behind it."""
    golden = bytes.fromhex(vector["hex"])
    for cut in cuts(len(golden)):
        assert 0 <= refusal(vector, golden[:cut]).offset <= cut
    for garbage in b"\0", b"\xff" * 4, golden:
        assert refusal(vector, golden + garbage).offset == len(golden)
