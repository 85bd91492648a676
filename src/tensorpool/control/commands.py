# SPDX-License-Identifier: Apache-2.0
"""Typed commands: what a handler's annotation accepts, decided before the handler is called.

    annotation                    accepts
    none, no parameter            NOTHING
    bool                          BOOLEAN, BIT
    int                           every integer format
    float                         FLOAT32, FLOAT64 and every integer format
    str, bytes                    STRING, BYTES
    Ref                           REF, or no bytes with a whole reference (H4)
    numpy.uint8 … numpy.float64   that format alone
    Literal["a", "b"]             STRING (or a number's format) with one of these values
    A | B | None                  any of them; a parameter with a default may be left out

Decision H3: a command is accepted when its key is known and its value is one that the handler takes.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import msgspec

from tensorpool.control.events import NUMBERS, Ref, read_value
from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.wire.event import EventMessage, Format

KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
INTEGERS: Final = frozenset(format for format in NUMBERS if not format.name.startswith("FLOAT"))
_PLAIN: Final[dict[object, frozenset[Format]]] = {
    None: frozenset([Format.NOTHING]),
    types.NoneType: frozenset([Format.NOTHING]),
    bool: frozenset([Format.BOOLEAN, Format.BIT]),
    int: INTEGERS,
    float: frozenset(NUMBERS),
    str: frozenset([Format.STRING]),
    bytes: frozenset([Format.BYTES]),
    Ref: frozenset([Format.REF]),
}


class Unacceptable(Exception):
    """Why a command is not accepted, as its sender reads it."""


class _Kind(msgspec.Struct, frozen=True):
    """One alternative of an annotation; `choices` narrow it down."""

    formats: frozenset[Format]
    words: str
    convert: Callable[[Any], Any] | None = None
    choices: tuple[object, ...] = ()

    def has(self, format: Format, value: object) -> bool:
        return format in self.formats and (not self.choices or value in self.choices)


class Command:
    """A key with its handler. `refuse` says why it cannot be done now, or None.

    A query changes no state. A note is a query that many clients send by themselves, and that needs no echo.
    What `is_authorised` has to be signed.

    Raises LocalProtocolError for a key or a signature that no command can have.
    """

    def __init__(
        self,
        key: str,
        handler: Callable[..., object],
        refuse: Callable[[], str | None] | None = None,
        *,
        is_query: bool = False,
        is_note: bool = False,
        is_authorised: bool = False,
    ) -> None:
        if not KEY.fullmatch(key):
            what = "1 to 64 letters, digits, '.', '_' and '-', with a letter or digit first"
            raise LocalProtocolError(f"command {key!r}: a key has {what}")
        self.key = key
        self.handler = handler
        self.is_query = is_query or is_note
        self.is_note = is_note
        self.is_authorised = is_authorised
        self._refuse = refuse
        self._has_parameter = False
        self._is_optional = True
        self._kinds: tuple[_Kind, ...] = tuple(_kinds(key, None))
        parameters = _parameters(key, handler)
        if len(parameters) > 1:
            raise LocalProtocolError(f"command {key}: a handler takes one value or none, this one {len(parameters)}")
        for parameter in parameters:
            self._has_parameter = True
            self._is_optional = parameter.default is not parameter.empty
            self._kinds = tuple(_kinds(key, parameter.annotation))

    @property
    def words(self) -> str:
        """What it takes."""
        found = [kind.words for kind in self._kinds]
        is_more = self._has_parameter and self._is_optional and "no value" not in found
        return " or ".join([*found, "no value"] if is_more else found)

    def read(self, message: EventMessage) -> tuple[object, ...]:
        """The arguments for the handler. Raises Unacceptable."""
        reason = self._refuse() if self._refuse is not None else None
        if reason is not None:
            raise Unacceptable(reason)
        try:
            format, value = read_value(message)
        except RemoteProtocolError as error:
            raise Unacceptable(f"{self.key} takes {self.words}; this is {error}") from None
        for kind in self._kinds:
            if kind.has(format, value):
                return (kind.convert(value) if kind.convert else value,) if self._has_parameter else ()
        if format is Format.NOTHING and self._has_parameter and self._is_optional:
            return ()
        shown = "" if value is None else f" {value!r:.80}"
        raise Unacceptable(f"{self.key} takes {self.words}; this is {format.name}{shown}")


def _parameters(key: str, handler: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(handler, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"command {key}: its handler's signature cannot be read: {error}") from None
    return list(signature.parameters.values())


def _kinds(key: str, annotation: Any) -> Iterator[_Kind]:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        for alternative in typing.get_args(annotation):
            yield from _kinds(key, alternative)
    elif origin is Literal:
        yield from _choices(typing.get_args(annotation))
    elif _is_numpy(annotation):
        yield _Kind(frozenset([Format[annotation.__name__.upper()]]), annotation.__name__.upper(), annotation)
    elif annotation in _PLAIN:
        yield _Kind(_PLAIN[annotation], _words(annotation), float if annotation is float else None)
    else:
        known = "None, bool, int, float, str, bytes, Ref, a Literal or a number of numpy"
        raise LocalProtocolError(f"command {key}: its handler's value must be annotated with {known}")


def _choices(values: tuple[object, ...]) -> Iterator[_Kind]:
    for kind in (bool, int, str, bytes):
        found = tuple(value for value in values if type(value) is kind)
        if found:
            yield _Kind(_PLAIN[kind], " or ".join(map(repr, found)), choices=found)


def _is_numpy(annotation: Any) -> bool:
    names = {format.name.lower() for format in NUMBERS}
    return getattr(annotation, "__module__", "") == "numpy" and getattr(annotation, "__name__", "") in names


def _words(annotation: object) -> str:
    named = {int: "an integer", float: "a number", str: "text", bytes: "bytes", bool: "a boolean", Ref: "a reference"}
    return named.get(typing.cast(type, annotation), "no value")
