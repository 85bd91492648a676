# SPDX-License-Identifier: Apache-2.0
"""What holds for every message, drawn from the schemas themselves, and for every string of bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.errors import LocalProtocolError
from tensorpool.wire import DecodeError, Message, bridge, control, decode, discovery, driver, event, merge, trace
from tensorpool.wire.sbe import Schema
from tensorpool.wire.schema import Block, Data, Field

SCHEMAS = [module.schema for module in (control, driver, bridge, merge, trace, event, discovery)]

# Text as it comes from the wire: any bytes, of which those that are not UTF-8 show as lone surrogates.
opaque_text = st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape"))
ascii_text = st.text(st.characters(max_codepoint=127), max_size=40)


def values_of(field: Field, types: dict[str, Any]) -> st.SearchStrategy[Any]:
    if field.enum:
        kind = bool if field.enum.is_bool else types[field.enum.name]
        values: st.SearchStrategy[Any] = st.sampled_from([kind(number) for number in field.enum.members.values()])
    else:
        numbers = st.integers(field.primitive.low, field.high)
        edges = st.sampled_from([field.primitive.low, field.high])
        values = (numbers | edges).filter(lambda number: number not in field.nulls)
    if field.length is not None:
        return st.tuples(*[values] * field.length)
    return st.none() | values if field.nulls else values


def data_of(data: Data) -> st.SearchStrategy[Any]:
    if data.is_text:
        return ascii_text if data.is_ascii else opaque_text
    return st.binary(max_size=min(data.maximum, 300))


def objects_of(cls: Any, block: Block, types: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Every object of a block's class, groups and all."""
    parts = {field.name: values_of(field, types) for field in block.visible}
    parts |= {
        group.name: st.lists(objects_of(types[group.class_name], group.entry, types), max_size=3).map(tuple)
        for group in block.groups
    }
    parts |= {data.name: data_of(data) for data in block.data}
    return st.builds(cls, **parts)


def messages_of(schema: Schema) -> st.SearchStrategy[Message]:
    return st.one_of(
        [
            objects_of(schema.types[message.name], message.block, schema.types)
            for document in schema.documents
            for message in document.messages
        ]
    )


MESSAGES = {schema.id: messages_of(schema) for schema in SCHEMAS}
any_message = st.one_of(list(MESSAGES.values()))


def without_filler(message: Message, data: bytes) -> bytes:
    """`data` with the bytes blanked that have no meaning in it: padding, and either null of a trace id."""
    blank = slice(0, 0)
    match message:
        case control.SlotHeader():
            blank = slice(8 + 34, 8 + 60)
        case control.TensorHeader():
            blank = slice(8 + 75, 8 + 184)
        case event.EventMessage():
            blank = slice(8 + 17, 8 + 20)
        case control.FrameDescriptor(trace_id=None):
            blank = slice(8 + 32, 8 + 40)
    return data[: blank.start] + bytes(blank.stop - blank.start) + data[blank.stop :]


def assert_message_or_decode_error(data: bytes) -> None:
    """Bytes either are a message, with nothing invented or lost, or raise DecodeError."""
    refusal: Exception | None = None
    try:
        message = decode(data)
    except DecodeError as error:
        refusal = error
    if isinstance(refusal, DecodeError):
        assert 0 <= refusal.offset <= len(data)
        return
    try:
        again = message.encode()
    except LocalProtocolError as error:
        refusal = error
    if refusal is not None:
        assert "expected ASCII text" in str(refusal)  # what we would not write is still read
        return
    assert decode(again) == message
    if len(again) == len(data):
        assert without_filler(message, again) == without_filler(message, data)
    else:
        # Only these may carry more than we know, which we do not repeat.
        assert isinstance(message, (event.EventMessage, discovery.DiscoveryRequest, discovery.DiscoveryResponse))
        assert len(again) < len(data)


@pytest.mark.parametrize("schema_id", MESSAGES)
@given(draw=st.data())
def test_every_message_survives_a_round_trip(schema_id: int, draw: st.DataObject) -> None:
    """Encoding and decoding gives the same message, with its header and without."""
    message = draw.draw(MESSAGES[schema_id])
    data = message.encode()
    assert decode(data) == message
    assert decode(memoryview(bytearray(data))) == message
    assert type(message).decode_body(message.encode_body()) == message
    assert data[8:] == message.encode_body()


@given(st.binary(max_size=400))
def test_random_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    """Nothing else escapes."""
    assert_message_or_decode_error(data)


@given(message=any_message, body=st.binary(max_size=400))
def test_random_bodies_are_a_message_or_a_decode_error(message: Message, body: bytes) -> None:
    """The same behind a header that is right."""
    assert_message_or_decode_error(message.encode()[:8] + body)


@given(message=any_message, draw=st.data())
def test_mutated_messages_are_a_message_or_a_decode_error(message: Message, draw: st.DataObject) -> None:
    """The same after replacing, removing or inserting bytes anywhere."""
    data = bytearray(message.encode())
    for _ in range(draw.draw(st.integers(1, 3), "mutations")):
        start = draw.draw(st.integers(0, len(data)), "start")
        end = draw.draw(st.integers(start, min(start + 8, len(data))), "end")
        data[start:end] = draw.draw(st.binary(max_size=8) | st.just(b"\xff" * (end - start)), "replacement")
    assert_message_or_decode_error(bytes(data))
