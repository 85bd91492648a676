# SPDX-License-Identifier: Apache-2.0
"""Settings: a TOML file, environment variables over it, flags over both, as frozen structs.

    flags  >  environment  >  file  >  default

A settings type is a frozen `msgspec.Struct` whose annotations say what may be set:

    annotation              in TOML               in the environment
    Struct                  [driver]
    Mapping[str, Struct]    [streams.<name>]      only for names that are in the file
    tuple[Struct, ...]      [[mappings]]          cannot be expressed
    anything else           key = value           DRIVER_CONTROL_STREAM_ID

A variable is its key in upper case with "_" for every character that is neither letter nor digit. In its text
integers are decimal, booleans `true` or `false`, arrays comma-separated. A variable that is no key may be
somebody else's and is left alone, even if it begins like ours; `lookalikes` finds those meant for us.

Everything else that is not understood is refused with a ConfigError, so that a typo never becomes a default.
Its text says which file, variable or flag the value came from. Driver Model §17; decisions A14, E35, E36.
"""

from __future__ import annotations

import difflib
import functools
import hmac
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Self

import msgspec
from msgspec import Meta
from msgspec.inspect import BoolType, IntType, LiteralType, Metadata, VarTupleType, type_info

from tensorpool.channel import check_channel
from tensorpool.errors import ConfigError

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]{0,19})")


def load[T: msgspec.Struct](
    settings: type[T],
    *,
    path: Path | None = None,
    built_in: Mapping[str, Any] = _NOTHING,
    environ: Mapping[str, str] = _NOTHING,
    overrides: Mapping[str, Any] = _NOTHING,
) -> T:
    """Read `path`, or `built_in` where there is none, lay `environ` and `overrides` over it, check it all.

    >>> load(DriverConfig, path=Path("camera.toml"), environ=os.environ, overrides={"shm.namespace": "lab1"})

    `overrides` are flags: dotted keys, or tables as mappings. A text among their values is read as that of a
    variable would be. Raises ConfigError.
    """
    home = "" if path is None else f" (in {path})"
    loader = _Loader(settings, home)
    loader.add(built_in if path is None else _read_toml(path), _Layer(home))
    loader.add_environment(environ)
    for key, value in overrides.items():
        loader.add(_nested(settings, key, value), _Layer(" (from a flag)", has_texts=True))
    return typing.cast(T, loader.build())


def check(settings: msgspec.Struct) -> None:
    """Refuse a struct that was built by hand with a value that `load` would refuse. Raises ConfigError."""
    for key, leaf, value in _values(settings, ""):
        _read(leaf, key, value)


def dump(settings: msgspec.Struct) -> dict[str, object]:
    """Every key with its value in effect, as TOML would have it; secrets stay hidden.

    >>> dump(config)["driver.stream_id_range"]
    '20000-29999'
    """
    return {key: _plain(value) for key, _, value in _values(settings, "")}


def known_keys(settings: type[msgspec.Struct]) -> dict[str, str | None]:
    """Every key with its environment variable, None where no variable can express it.

    >>> known_keys(DriverConfig)["profiles.<name>.header_nslots"]
    'PROFILES_<NAME>_HEADER_NSLOTS'
    """
    return {key: None if leaf is None or "[]" in key else env_name(key) for key, leaf in _known(settings, "")}


def env_name(key: str) -> str:
    """The environment variable of a key."""
    return re.sub(r"[^A-Z0-9<>]", "_", key.upper())


def lookalikes(settings: msgspec.Struct, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are almost one of ours and were therefore passed over, with ours: worth a warning.

    >>> lookalikes(config, {"DRIVER_CONTOL_STREAM_ID": "1001"})
    {'DRIVER_CONTOL_STREAM_ID': 'DRIVER_CONTROL_STREAM_ID'}
    """
    known = {env_name(key) for key, _, _ in _values(settings, "") if "[" not in key}
    found = {}
    for name in sorted(environ.keys() - known):
        close = difflib.get_close_matches(name, sorted(known), 1, 0.85)
        if close and name.partition("_")[0] == close[0].partition("_")[0]:
            found[name] = close[0]
    return found


class _Layer(msgspec.Struct, frozen=True):
    """Where values come from, as errors say it, and whether texts among them stand for other types."""

    origin: str
    has_texts: bool = False


class _Loader:
    """Collects raw values and where they came from, then turns them into structs.

    `home` names the file, for faults that no given value is guilty of, such as a missing table.
    """

    def __init__(self, settings: type[msgspec.Struct], home: str) -> None:
        self._home = home
        self._settings = settings
        self._tree: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def add(self, table: Mapping[str, Any], layer: _Layer) -> None:
        """Lay a table over what is there; refuses keys that do not exist."""
        try:
            self._graft(self._settings, table, self._tree, "", layer)
        except ConfigError as error:
            raise _with_origin(error, layer.origin) from None

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Lay over the variables that belong to a key; refuses one that belongs to two."""
        owners: dict[str, list[tuple[str, _Leaf, dict[str, Any], str]]] = {}
        for place in _places(self._settings, self._tree, ""):
            owners.setdefault(env_name(place[0]), []).append(place)
        for variable in sorted(owners.keys() & environ.keys()):
            key, leaf, node, name = owners[variable][0]
            if len(owners[variable]) > 1:
                keys = " and ".join(place[0] for place in owners[variable])
                accepted = f"the variable of one key, not of {keys}; set them in the file or rename a table"
                raise ConfigError(variable, _HIDDEN if leaf.is_secret else environ[variable], accepted)
            node[name] = _from_text(leaf, environ[variable])
            self._origins[key] = f" (from the environment variable {variable})"

    def build(self) -> msgspec.Struct:
        try:
            return _build(self._settings, self._tree, "")
        except ConfigError as error:
            raise _with_origin(error, self._origin(error.key)) from None

    def _graft(
        self, struct: type[msgspec.Struct], table: Any, node: dict[str, Any], prefix: str, layer: _Layer
    ) -> None:
        fields = _fields(struct)
        for name, value in _table(prefix, table, f"with {', '.join(fields)}").items():
            if name not in fields:
                raise self._unknown(prefix, name, value, fields)
            field, key = fields[name], _join(prefix, name)
            if field.leaf is not None:
                is_text = layer.has_texts and isinstance(value, str)
                node[name] = _from_text(field.leaf, value) if is_text else value
                self._origins[key] = layer.origin
            elif field.shape is _Shape.SECTION:
                self._graft(field.struct, value, node.setdefault(name, {}), key, layer)
            elif field.shape is _Shape.NAMED:
                for given, entry in _table(key, value, "of tables").items():
                    child = node.setdefault(name, {}).setdefault(given, {})
                    self._graft(field.struct, entry, child, _join(key, given), layer)
            else:
                node[name] = [{} for _ in _array(key, value)]
                self._origins[key] = layer.origin
                for index, (entry, child) in enumerate(zip(value, node[name], strict=True)):
                    self._graft(field.struct, entry, child, f"{key}[{index}]", layer)

    def _unknown(self, prefix: str, name: str, value: object, fields: dict[str, _Field]) -> ConfigError:
        elsewhere = [key for key, _ in _known(self._settings, "") if key.rpartition(".")[2] == name]
        nearest = elsewhere or [_join(prefix, near) for near in difflib.get_close_matches(name, fields, 1, 0.5)]
        what = f"a known key; the nearest is {nearest[0]}" if nearest else f"one of {', '.join(fields)}"
        # A text may be a secret whose key was misspelt.
        shown = _shown(value) if isinstance(value, int | float | Mapping) else _HIDDEN
        return ConfigError(_join(prefix, name), shown, what)

    def _origin(self, key: str) -> str:
        """Where the key, or the array that holds it, was given."""
        while key and key not in self._origins:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self._origins.get(key, self._home)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError("config file", str(path), f"a file that can be read; {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("config file", str(path), f"UTF-8; byte {error.start} is not") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config file", str(path), f"TOML; {error}") from None


def _nested(struct: type[msgspec.Struct], key: str, value: Any) -> dict[str, Any]:
    """A dotted key as tables. The name of a named table may itself have dots."""
    first, _, rest = key.partition(".")
    field = _fields(struct).get(first)
    if not rest or field is None or field.shape in (_Shape.LEAF, _Shape.ARRAY):
        return {key: value}
    if field.shape is _Shape.SECTION:
        return {first: _nested(field.struct, rest, value)}
    name, _, last = rest.rpartition(".")
    return {first: {name: {last: value}} if name else {rest: value}}


def _places(
    struct: type[msgspec.Struct], node: dict[str, Any], prefix: str
) -> Iterator[tuple[str, _Leaf, dict[str, Any], str]]:
    """Every key that a variable could set, with the table and the name to set it by."""
    for name, field in _fields(struct).items():
        key = _join(prefix, name)
        if field.leaf is not None:
            yield key, field.leaf, node, name
        elif field.shape is _Shape.SECTION:
            yield from _places(field.struct, node.setdefault(name, {}), key)
        elif field.shape is _Shape.NAMED:
            for given, child in node.get(name, {}).items():
                yield from _places(field.struct, child, _join(key, given))


def _build(struct: type[msgspec.Struct], node: Mapping[str, Any], prefix: str) -> msgspec.Struct:
    values: dict[str, Any] = {}
    for name, field in _fields(struct).items():
        key = _join(prefix, name)
        if field.shape is _Shape.SECTION:
            values[name] = _build(field.struct, node.get(name, {}), key)
        elif name not in node:
            if field.is_required:
                accepted = field.leaf.accepted if field.leaf else "an array of tables"
                raise ConfigError(key, _Note("missing"), f"{accepted}; the key is required")
        elif field.leaf is not None:
            values[name] = _read(field.leaf, key, node[name])
        elif field.shape is _Shape.NAMED:
            tables = node[name]
            values[name] = {given: _build(field.struct, tables[given], _join(key, given)) for given in tables}
        else:
            entries = enumerate(node[name])
            values[name] = tuple(_build(field.struct, entry, f"{key}[{index}]") for index, entry in entries)
    return struct(**values)


def _with_origin(error: ConfigError, origin: str) -> ConfigError:
    return ConfigError(error.key, error.value, error.accepted + origin)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _table(key: str, value: Any, content: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(key, _shown(value), f"a table {content}")
    return value


def _array(key: str, value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(key, _shown(value), "an array of tables")
    return value


class _Shape(Enum):
    """The rows of the table at the top."""

    SECTION = auto()
    NAMED = auto()
    ARRAY = auto()
    LEAF = auto()


class _Leaf(msgspec.Struct, frozen=True):
    """A key that holds a value; `item` is what an array holds, `check` refuses what the type cannot."""

    hint: Any
    kind: msgspec.inspect.Type
    accepted: str
    check: Callable[[str, Any], object] | None
    item: _Leaf | None
    is_secret: bool
    is_range: bool


class _Field(msgspec.Struct, frozen=True):
    shape: _Shape
    is_required: bool
    struct: type[msgspec.Struct] = msgspec.Struct  # what the tables are
    leaf: _Leaf | None = None


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, _Field]:
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    return {field.name: _field(hints[field.name], is_required=field.required) for field in fields}


def _field(hint: Any, *, is_required: bool) -> _Field:
    if _is_struct(hint):
        return _Field(_Shape.SECTION, is_required, hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Mapping and _is_struct(arguments[1]):
        return _Field(_Shape.NAMED, is_required, arguments[1])
    if typing.get_origin(hint) is tuple and _is_struct(arguments[0]):
        return _Field(_Shape.ARRAY, is_required, arguments[0])
    return _Field(_Shape.LEAF, is_required, leaf=_leaf(hint))


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _leaf(hint: Any) -> _Leaf:
    kind, description, checker = type_info(hint), "", None
    if isinstance(kind, Metadata):
        description = (kind.extra_json_schema or {}).get("description", "")
        checker = (kind.extra or {}).get("check")
        kind = kind.type
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    item = _leaf(typing.get_args(bare)[0]) if isinstance(kind, VarTupleType) else None
    accepted = description or _describe(kind, bare, item)
    return _Leaf(hint, kind, accepted, checker, item, is_secret=bare is Secret, is_range=bare is Range)


def _describe(kind: msgspec.inspect.Type, bare: Any, item: _Leaf | None) -> str:
    match kind:
        case BoolType():
            return "true or false"
        case IntType(ge=low, le=high):
            return f"an integer from {low} to {high}"
        case LiteralType(values=values):
            return " or ".join(map(str, values))
    return f"an array, each entry {item.accepted}" if item else getattr(bare, "ACCEPTED", "text")


def _known(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, _Leaf | None]]:
    """Every key that a file may hold; None stands for an array, before the keys of its tables."""
    for name, field in _fields(struct).items():
        key = _join(prefix, name)
        if field.leaf is not None or field.shape is _Shape.ARRAY:
            yield key, field.leaf
        if field.leaf is None:
            suffix = {_Shape.NAMED: ".<name>", _Shape.ARRAY: "[]"}.get(field.shape, "")
            yield from _known(field.struct, key + suffix)


def _values(settings: msgspec.Struct, prefix: str) -> Iterator[tuple[str, _Leaf, Any]]:
    for name, field in _fields(type(settings)).items():
        key, value = _join(prefix, name), getattr(settings, name)
        if field.leaf is not None:
            yield key, field.leaf, value
        elif field.shape is _Shape.SECTION:
            yield from _values(value, key)
        elif field.shape is _Shape.NAMED:
            for given, entry in value.items():
                yield from _values(entry, _join(key, given))
        else:
            for index, entry in enumerate(value):
                yield from _values(entry, f"{key}[{index}]")


class _Note:
    """Stands in an error for a value that is absent, secret or a table."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"


_HIDDEN: Final = _Note("hidden")


def _shown(value: object) -> object:
    # A table where none belongs may hold a secret.
    if isinstance(value, Mapping):
        return _Note("table")
    return [_shown(entry) for entry in value] if isinstance(value, list | tuple) else value


def _read(leaf: _Leaf, key: str, value: Any) -> Any:
    """The value as its annotation wants it. Raises ConfigError."""
    shown = _HIDDEN if leaf.is_secret else _shown(value)
    if leaf.item is not None and isinstance(value, list | tuple):
        value = tuple(_read(leaf.item, f"{key}[{index}]", entry) for index, entry in enumerate(value))
    try:
        value = msgspec.convert(value, leaf.hint, dec_hook=_parse)
    except msgspec.ValidationError:
        raise ConfigError(key, shown, leaf.accepted) from None
    if leaf.check is not None:
        leaf.check(key, value)
    return value


def _parse(kind: Any, value: object) -> object:
    return value if isinstance(value, kind) else kind.parse(value)


def _from_text(leaf: _Leaf, text: str) -> object:
    """What the text of a variable stands for; one that stands for nothing is left for `_read` to refuse."""
    if leaf.item is not None:
        return [_from_text(leaf.item, entry) for entry in text.split(",")] if text else []
    if isinstance(leaf.kind, BoolType):
        return {"true": True, "false": False}.get(text, text)
    if isinstance(leaf.kind, IntType):
        return _decimal(text)
    if leaf.is_range and "," in text:
        return [_decimal(entry) for entry in text.split(",")]
    return text


def _decimal(text: str) -> int | str:
    return int(text) if _DECIMAL.fullmatch(text) else text


def _plain(value: Any) -> object:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Range | Secret) else value


class Range:
    """Ids from `first` to `last`, both included. `Range()` is empty and disables what it stands for.

    >>> ids = Range.parse("20000-29999")
    >>> len(ids), 29999 in ids, ids.overlaps(Range(29999, 30001))
    (10000, True, True)

    `parse` reads "first-last" or [first, last], and "" or [] as the empty range. Raises ValueError.
    """

    ACCEPTED: ClassVar = '"first-last" or [first, last] with first <= last, or "" for none'
    _TEXT: ClassVar = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")

    __slots__ = ("_ids",)

    def __init__(self, first: int = 0, last: int = -1) -> None:
        if not 0 <= first <= last and (first, last) != (0, -1):
            raise ValueError(f"{first}-{last} is no range of ids")
        self._ids = range(first, last + 1)

    @classmethod
    def parse(cls, value: object) -> Self:
        match value:
            case "" | []:
                return cls()
            case str() if match := cls._TEXT.fullmatch(value):
                return cls(int(match[1]), int(match[2]))
            case [first, last] if type(first) is int and type(last) is int:
                if first <= last:
                    return cls(first, last)
        raise ValueError(f"{value!r} is not {cls.ACCEPTED}")

    @property
    def first(self) -> int:
        return self._ids.start

    @property
    def last(self) -> int:
        return self._ids.stop - 1

    def overlaps(self, other: Range) -> bool:
        """Whether some id is in both."""
        return max(self.first, other.first) <= min(self.last, other.last)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value in self._ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Range) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self else ""

    def __repr__(self) -> str:
        return f"Range({self.first}, {self.last})" if self else "Range()"


class Secret(str):
    """A text that is shown by neither `repr`, `str`, a format nor an error; `encode` gives its bytes.

    >>> Secret("s3cret")
    Secret(<hidden>)
    """

    ACCEPTED: ClassVar = 'ASCII text, or "" for none'

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        if not isinstance(value, str) or not value.isascii():
            raise ValueError(f"the secret is not {cls.ACCEPTED}")
        return cls(value)

    def matches(self, text: str) -> bool:
        """Whether `text` is this, in a time that does not tell how much is right. "" matches nothing."""
        ours, given = (each.encode(errors="surrogatepass") for each in (self, text))
        return hmac.compare_digest(ours, given) and bool(ours)

    def __str__(self) -> str:
        return "<hidden>" if self else ""

    def __repr__(self) -> str:
        return f"Secret({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _ids_within(low: int, high: int) -> Meta:
    def check_bounds(key: str, ids: Range) -> None:
        if ids and not low <= ids.first <= ids.last <= high:
            raise ConfigError(key, str(ids), f"ids from {low} to {high}")

    return Meta(extra={"check": check_bounds})


_MAX_AERON_ID: Final = 2**31 - 1  # A14: Aeron's are int32
_MAX_STREAM_ID: Final = 2**32 - 2  # A14: 0 is none, all ones is null

# E21: a tensor stream's own id and the id of an Aeron stream are different things.
StreamId = Annotated[int, Meta(ge=1, le=_MAX_STREAM_ID)]
StreamIdRange = Annotated[Range, _ids_within(1, _MAX_STREAM_ID)]
AeronStreamId = Annotated[int, Meta(ge=1, le=_MAX_AERON_ID)]
AeronStreamIdRange = Annotated[Range, _ids_within(1, _MAX_AERON_ID)]
Channel = Annotated[str, Meta(description="an Aeron URI", extra={"check": check_channel})]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
PositiveU32 = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Name = Annotated[str, Meta(pattern=r"\A[!-~]+\Z", description="visible ASCII without spaces, not empty")]


def fill(section: msgspec.Struct, name: str, absent: object, value: object) -> None:
    """Derive a setting that was left out. `absent` is what no file can say: its annotation refuses it."""
    if getattr(section, name) == absent:
        msgspec.structs.force_setattr(section, name, value)
