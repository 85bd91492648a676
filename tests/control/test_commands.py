# SPDX-License-Identifier: Apache-2.0
"""Typed commands: what an annotation accepts, and how a refusal is worded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from tensorpool.control import Ref, make_event
from tensorpool.control.commands import Command, Unacceptable
from tensorpool.errors import LocalProtocolError
from tensorpool.wire.event import Format


def nothing() -> None: ...
def truth(value: bool) -> None: ...
def whole(value: int) -> None: ...
def number(value: float) -> None: ...
def text(value: str) -> None: ...
def blob(value: bytes) -> None: ...
def frame(value: Ref) -> None: ...
def narrow(value: np.uint16) -> None: ...
def choice(value: Literal["a", "b", 3]) -> None: ...
def either(value: int | str | None) -> None: ...
def optional(value: int = 3) -> None: ...


def read(handler: Callable[..., object], value: object, format: Format | None = None) -> tuple[object, ...]:
    event = make_event("t", "k", value, correlation_id=0, timestamp_ns=0, format=format)
    return Command("k", handler).read(event)


@pytest.mark.parametrize(
    ("handler", "value", "format", "arguments"),
    [
        (nothing, None, None, ()),
        (truth, True, None, (True,)),
        (truth, False, Format.BIT, (False,)),
        *((whole, 7, format, (7,)) for format in Format if 1 <= format <= 8),
        (number, 2.5, Format.FLOAT32, (2.5,)),
        (number, 2, None, (2.0,)),
        (text, "", None, ("",)),
        (blob, b"x", None, (b"x",)),
        (frame, Ref(1, 2, 3), None, (Ref(1, 2, 3),)),
        (narrow, 7, Format.UINT16, (np.uint16(7),)),
        (choice, "b", None, ("b",)),
        (choice, 3, Format.UINT8, (3,)),
        (either, None, None, (None,)),
        (either, "x", None, ("x",)),
        (optional, None, None, ()),
        (optional, 4, None, (4,)),
    ],
)
def test_an_annotation_accepts_its_formats(
    handler: Callable[..., object], value: object, format: Format | None, arguments: tuple[object, ...]
) -> None:
    """And hands the value over in the annotation's type."""
    found = read(handler, value, format)
    assert found == arguments
    assert [type(one) for one in found] == [type(one) for one in arguments]


@pytest.mark.parametrize(
    ("handler", "value", "format", "words"),
    [
        (nothing, 1, None, "k takes no value; this is INT64 1"),
        (nothing, Ref(1, 2, 3), None, "k takes no value; this is REF"),
        (truth, 1, None, "k takes a boolean; this is INT64 1"),
        (whole, 1.0, None, "an integer; this is FLOAT64 1.0"),
        (whole, True, None, "an integer; this is BOOLEAN True"),
        (whole, None, None, "an integer; this is NOTHING"),
        (number, "1", None, "a number; this is STRING '1'"),
        (text, b"1", None, "text; this is BYTES"),
        (narrow, 7, Format.UINT32, "UINT16; this is UINT32 7"),
        (choice, "c", None, "3 or 'a' or 'b'; this is STRING 'c'"),
        (optional, "x", None, "an integer or no value; this is STRING 'x'"),
        (text, "x" * 5000, Format.BYTES, ""),
    ],
)
def test_another_format_is_refused_with_what_would_do(
    handler: Callable[..., object], value: Any, format: Format | None, words: str
) -> None:
    """Expected and found."""
    if format is Format.BYTES:
        value = value.encode()
    with pytest.raises(Unacceptable) as refused:
        read(handler, value, format)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


def test_a_handler_may_be_a_method_and_a_command_may_be_refused_for_now() -> None:
    """`self` is no value; a precondition goes before the value."""

    class Host:
        def gain(self, value: float) -> float:
            return value

    command = Command("gain", Host().gain, lambda: "the motor is off")
    with pytest.raises(Unacceptable, match="the motor is off"):
        command.read(make_event("t", "gain", "x", correlation_id=0, timestamp_ns=0))


@pytest.mark.parametrize(
    ("key", "handler"),
    [
        ("", nothing),
        ("result:x", nothing),
        ("a b", nothing),
        ("ä", nothing),
        ("x" * 65, nothing),
        ("k", lambda value: None),
        ("k", lambda a, b: None),
    ],
)
def test_what_no_command_can_have_is_refused_when_it_is_made(key: str, handler: Callable[..., object]) -> None:
    """A key that could be taken for an answer, a value without a type."""
    with pytest.raises(LocalProtocolError):
        Command(key, handler)


def test_types_that_cannot_travel_are_refused() -> None:
    """With those that can."""

    def lists(value: list[int]) -> None: ...
    def unknown(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for handler in (lists, unknown):
        with pytest.raises(LocalProtocolError, match="command k"):
            Command("k", handler)
