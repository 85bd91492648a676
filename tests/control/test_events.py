# SPDX-License-Identifier: Apache-2.0
"""Values in events: every format both ways, and bytes that are not what they claim to be."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.control import Alive, Ref, State, make_event, read_alive, read_value
from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.wire import decode
from tensorpool.wire.event import EventMessage, Format

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.builds(Ref, st.integers(0, 2**32 - 2), st.integers(0, 2**64 - 2), st.integers(0, 2**64 - 2)),
)


def carry(value: object, format: Format | None = None) -> EventMessage:
    return make_event("service:x", "k", value, correlation_id=1, timestamp_ns=2, format=format)


def message(format: Format, value: bytes = b"", **fields: Any) -> EventMessage:
    return EventMessage(timestamp_ns=0, correlation_id=0, format=format, value=value, **fields)


@given(VALUES)
def test_what_is_sent_is_what_is_read(value: object) -> None:
    """Across the wire, type and all; a reference leaves no bytes in the value."""
    sent = decode(carry(value).encode())
    assert isinstance(sent, EventMessage)
    _, found = read_value(sent)
    assert (type(found), found) == (type(value), value)
    if isinstance(value, Ref):
        assert sent.value == b""


@given(st.sampled_from(list(Format)), st.binary(max_size=12), st.tuples(*[st.sampled_from([None, 7])] * 3))
def test_any_bytes_are_read_or_refused(format: Format, data: bytes, ref: tuple[int | None, ...]) -> None:
    """No value of a peer raises anything but RemoteProtocolError; what is read is sent again as the same bytes."""
    event = message(format, data, ref_stream_id=ref[0], ref_epoch=ref[1], ref_seq=ref[2])
    try:
        found_format, value = read_value(event)
    except RemoteProtocolError:
        return
    if found_format is not Format.REF and not (isinstance(value, float) and math.isnan(value)):
        assert carry(value, found_format).value == data


@pytest.mark.parametrize("name", [format.name.lower() for format in Format if 1 <= format <= 10])
def test_a_number_of_numpy_keeps_its_format(name: str) -> None:
    """In place of the widest."""
    event = carry(getattr(np, name)(7))
    assert (event.format.name.lower(), read_value(event)[1]) == (name, 7)


@pytest.mark.parametrize(
    ("value", "format", "data"),
    [
        (-1, Format.INT64, b"\xff" * 8),
        (2**63, Format.UINT64, struct.pack("<Q", 2**63)),
        (7, Format.UINT16, b"\x07\x00"),
        (1, Format.FLOAT32, struct.pack("<f", 1)),
        (True, Format.BOOLEAN, b"\x01"),
        (True, Format.BIT, b"\x01"),
        (np.bool_(False), Format.BOOLEAN, b"\x00"),
        ("ä", Format.STRING, b"\xc3\xa4"),
        ({"a": [1]}, Format.STRING, b'{"a":[1]}'),
    ],
)
def test_values_have_the_bytes_of_their_format(value: object, format: Format, data: bytes) -> None:
    """Little-endian, as everything."""
    event = carry(value, None if isinstance(value, dict) else format)
    assert (event.format, event.value) == (format, data)


@pytest.mark.parametrize(
    ("value", "format"),
    [
        (256, Format.UINT8),
        (-1, Format.UINT64),
        (1 << 64, None),
        (1.5, Format.INT64),
        (True, Format.INT64),
        ("1", Format.INT64),
        (1, Format.STRING),
        (1e300, Format.FLOAT32),
        ("x", Format.NOTHING),
        (Ref(0xFFFFFFFF, 1, 1), None),
        (object(), None),
        (np.float16(1), None),
    ],
)
def test_a_value_that_does_not_fit_its_format_is_refused(value: object, format: Format | None) -> None:
    """Before anything is sent."""
    with pytest.raises(LocalProtocolError):
        carry(value, format).encode()


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (message(Format.REF, ref_stream_id=1, ref_epoch=2, ref_seq=3), Ref(1, 2, 3)),
        (message(Format.NOTHING, ref_stream_id=1, ref_epoch=2, ref_seq=3), Ref(1, 2, 3)),
        (message(Format.NOTHING, ref_stream_id=1, ref_epoch=2), None),
        (message(Format.NOTHING), None),
        (message(Format.STRING, ref_stream_id=1, ref_epoch=2, ref_seq=3), ""),
        (message(Format.BYTES), b""),
    ],
)
def test_no_bytes_are_a_reference_only_when_all_of_it_is_there(event: EventMessage, found: object) -> None:
    """H4; text and bytes may be empty in their own right."""
    assert read_value(event)[1] == found


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (message(Format.REF, ref_stream_id=1, ref_epoch=2), "without stream id, epoch and seq"),
        (message(Format.REF, b"\x01", ref_stream_id=1, ref_epoch=2, ref_seq=3), "must not repeat"),
        (message(Format.UINT32, b"\x01"), "1 bytes, UINT32 has 4"),
        (message(Format.UINT32), "0 bytes, UINT32 has 4"),
        (message(Format.NOTHING, b"\x01"), "NOTHING has 0"),
        (message(Format.BOOLEAN, b"\x02"), "neither 0 nor 1"),
        (message(Format.STRING, b"a\xff"), "byte 1 is no UTF-8"),
    ],
)
def test_bytes_that_are_not_of_their_format_are_refused_in_words(event: EventMessage, words: str) -> None:
    """That name the fault."""
    with pytest.raises(RemoteProtocolError, match=words):
        read_value(event)


def test_a_sign_of_life_is_read_and_nothing_else_is_one() -> None:
    """Whatever a peer writes under its key."""
    alive = Alive(service="driver", instance=None, pid=1, state=State.PAUSED, version="1")
    sent = make_event("service:driver", "alive", alive, correlation_id=0, timestamp_ns=0)
    assert read_alive(sent) == alive
    for value in (b"", b"{}", b"\xff", b'{"service":1}', sent.value.replace(b"paused", b"asleep")):
        assert read_alive(message(Format.STRING, value, key="alive")) is None
    assert read_alive(message(Format.STRING, sent.value, key="status")) is None
