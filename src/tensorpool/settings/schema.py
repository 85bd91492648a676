# SPDX-License-Identifier: Apache-2.0
"""What a settings type accepts: its tables and keys, read from the annotations of its structs.

A settings type is a frozen `msgspec.Struct` whose annotations say what may be set:

    annotation              in TOML               in the environment
    Struct                  [driver]
    Mapping[str, Struct]    [streams.<name>]      only for names that are in the file
    tuple[Struct, ...]      [[mappings]]          cannot be expressed
    anything else           key = value           DRIVER_CONTROL_STREAM_ID

A key that may be left out has a default, or a `Derived` in its annotation: then its value follows from other keys.
The text below a field says what the key means. `describe` returns all of it, key by key.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Annotated, Any, Final

import msgspec
from msgspec.inspect import BoolType, IntType, LiteralType, Metadata, VarTupleType, type_info

from tensorpool.errors import ConfigError
from tensorpool.settings.values import Range, Secret

_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]{0,19})")


class Derived:
    """In an annotation: the value of a key that was left out.

    `text` says it for the reference. Without a `rule` it is the key to copy; otherwise the rule is called with the
    table that holds the key and with the root: their keys are attributes, those that are declared earlier. A lambda in
    an annotation cannot see the module's names: a rule that needs them is a function of its own.

    >>> Derived("driver.control_channel")                                                    # doctest: +SKIP
    >>> Derived("three announce periods", lambda table, root: 3 * table.announce_period_ms)  # doctest: +SKIP
    """

    def __init__(self, text: str, rule: Callable[[Any, Any], Any] | None = None) -> None:
        self.text: Final = text
        self._rule = rule

    def value(self, table: Any, root: Any) -> Any:
        if self._rule is not None:
            return self._rule(table, root)
        return functools.reduce(getattr, self.text.split("."), root)


class Shape(Enum):
    """The rows of the table at the top."""

    SECTION = auto()
    NAMED = auto()
    ARRAY = auto()
    LEAF = auto()


class Leaf(msgspec.Struct, frozen=True):
    """A key that holds a value; `item` is what an array holds, `check` refuses what the type cannot."""

    hint: Any
    kind: msgspec.inspect.Type
    accepted: str
    check: Callable[[str, Any], object] | None
    item: Leaf | None
    is_secret: bool
    is_range: bool

    def read(self, key: str, value: Any) -> Any:
        """The value as its annotation wants it. Raises ConfigError."""
        given = HIDDEN if self.is_secret else shown(value)
        if self.item is not None and isinstance(value, list | tuple):
            value = tuple(self.item.read(f"{key}[{index}]", entry) for index, entry in enumerate(value))
        try:
            value = msgspec.convert(value, self.hint, dec_hook=_parse)
        except msgspec.ValidationError:
            raise ConfigError(key, given, self.accepted) from None
        if self.check is not None:
            self.check(key, value)
        return value

    def from_text(self, text: str) -> object:
        """The value that the text of a variable stands for; any other text is left for `read` to refuse."""
        if self.item is not None:
            return [self.item.from_text(entry) for entry in text.split(",")] if text else []
        if isinstance(self.kind, BoolType):
            return {"true": True, "false": False}.get(text, text)
        if isinstance(self.kind, IntType):
            return _decimal(text)
        if self.is_range and "," in text:
            return [_decimal(entry) for entry in text.split(",")]
        return text


class Field(msgspec.Struct, frozen=True):
    """A field of a settings struct. `struct` is the type of its tables, `leaf` is set where it holds a value."""

    shape: Shape
    is_required: bool
    struct: type[msgspec.Struct] = msgspec.Struct
    leaf: Leaf | None = None
    derived: Derived | None = None
    make_default: Callable[[], Any] = lambda: None


class Key(msgspec.Struct, frozen=True):
    """A key as the reference shows it. `default` is None where the key is required."""

    key: str
    accepted: str
    default: str | None
    is_derived: bool
    meaning: str


@functools.cache
def fields(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """The fields of a settings struct by name, in the order of their declaration."""
    hints = typing.get_type_hints(struct, include_extras=True)
    return {field.name: _field(hints[field.name], field) for field in msgspec.structs.fields(struct)}


def known(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Field, type[msgspec.Struct]]]:
    """Every key that a file may hold, with its field and the struct that declares it; arrays precede their tables."""
    for name, field in fields(struct).items():
        key = join(prefix, name)
        if field.leaf is not None or field.shape is Shape.ARRAY:
            yield key, field, struct
        if field.leaf is None:
            suffix = {Shape.NAMED: ".<name>", Shape.ARRAY: "[]"}.get(field.shape, "")
            yield from known(field.struct, key + suffix)


def values(settings: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Leaf, Any]]:
    """Every key of a settings struct with its value."""
    for name, field in fields(type(settings)).items():
        key, value = join(prefix, name), getattr(settings, name)
        if field.leaf is not None:
            yield key, field.leaf, value
        elif field.shape is Shape.SECTION:
            yield from values(value, key)
        elif field.shape is Shape.NAMED:
            for given, entry in value.items():
                yield from values(entry, join(key, given))
        else:
            for index, entry in enumerate(value):
                yield from values(entry, f"{key}[{index}]")


def describe(struct: type[msgspec.Struct], prefix: str = "") -> list[Key]:
    """Every key with what it accepts, its default and its meaning: the reference of these settings."""
    described = []
    for key, field, owner in known(struct, prefix):
        accepted = field.leaf.accepted if field.leaf else "an array of tables"
        meaning = _meanings(owner).get(key.rpartition(".")[2], "")
        described.append(Key(key, accepted, _default(field), field.derived is not None, meaning))
    return described


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def plain(value: Any) -> object:
    """A value as TOML would have it; a secret stays hidden."""
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Range | Secret) else value


class Note:
    """Stands in an error for a value that is absent, secret or a table."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"


HIDDEN: Final = Note("hidden")


def shown(value: object) -> object:
    """A value as errors show it."""
    # A table where none belongs may hold a secret.
    if isinstance(value, Mapping):
        return Note("table")
    return [shown(entry) for entry in value] if isinstance(value, list | tuple) else value


def _field(hint: Any, declared: msgspec.structs.FieldInfo) -> Field:
    if _is_struct(hint):
        return Field(Shape.SECTION, declared.required, hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Mapping and _is_struct(arguments[1]):
        return Field(Shape.NAMED, declared.required, arguments[1], make_default=_maker(declared))
    if typing.get_origin(hint) is tuple and _is_struct(arguments[0]):
        return Field(Shape.ARRAY, declared.required, arguments[0], make_default=_maker(declared))
    extras = arguments[1:] if typing.get_origin(hint) is Annotated else ()
    derived = next((extra for extra in extras if isinstance(extra, Derived)), None)
    is_required = declared.required and derived is None
    return Field(Shape.LEAF, is_required, leaf=_leaf(hint), derived=derived, make_default=_maker(declared))


def _maker(declared: msgspec.structs.FieldInfo) -> Callable[[], Any]:
    factory, default = declared.default_factory, declared.default
    return (lambda: default) if factory is msgspec.NODEFAULT else factory


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _leaf(hint: Any) -> Leaf:
    kind, description, checker = type_info(hint), "", None
    if isinstance(kind, Metadata):
        description = (kind.extra_json_schema or {}).get("description", "")
        checker = (kind.extra or {}).get("check")
        kind = kind.type
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    item = _leaf(typing.get_args(bare)[0]) if isinstance(kind, VarTupleType) else None
    accepted = description or _accepted(kind, bare, item)
    return Leaf(hint, kind, accepted, checker, item, is_secret=bare is Secret, is_range=bare is Range)


def _accepted(kind: msgspec.inspect.Type, bare: Any, item: Leaf | None) -> str:
    match kind:
        case BoolType():
            return "true or false"
        case IntType(ge=low, le=high):
            return f"an integer from {low} to {high}"
        case LiteralType(values=choices):
            return " or ".join(map(str, choices))
    return f"an array, each entry {item.accepted}" if item else getattr(bare, "ACCEPTED", "text")


def _default(field: Field) -> str | None:
    if field.derived is not None:
        return field.derived.text
    if field.is_required:
        return None
    value = () if field.leaf is None else plain(field.make_default())
    return msgspec.json.encode(value).decode()


@functools.cache
def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The texts below the fields of a struct and of the structs that it inherits from."""
    found = dict(_meanings(struct.__base__)) if struct.__base__ not in (None, msgspec.Struct) else {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as meaning)):
                found[name] = inspect.cleandoc(meaning).replace("\n", " ")
    return found


def _parse(kind: Any, value: object) -> object:
    return value if isinstance(value, kind) else kind.parse(value)


def _decimal(text: str) -> int | str:
    return int(text) if _DECIMAL.fullmatch(text) else text
