# SPDX-License-Identifier: Apache-2.0
"""The loader: a TOML file, environment variables over it, flags over both, resolved into frozen structs.

    flags  >  environment  >  file  >  default, or derived from other keys

A variable is its key in upper case with "_" for every character that is neither letter nor digit. In its text
integers are decimal, booleans `true` or `false`, arrays comma-separated. A variable that is no key may belong to
another program and is left alone, even if it begins like ours; `lookalikes` finds those that are probably misspelt.

The raw tables hold the values that were given and where each came from. Only a complete struct is made of them: every
key that was left out has its default or its derived value. Input that is not understood is refused with a ConfigError,
so that a typo never becomes a default; the error names the file, variable or flag. Driver Model §17; decisions A14,
E35, E36.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, cast

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.settings.schema import HIDDEN, Field, Leaf, Note, Shape, fields, join, known, plain, shown, values

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


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
    return cast(T, loader.build())


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one process, complete and consistent: the base of DriverConfig, BridgeConfig and the others.

    A subclass declares its tables and refuses what contradicts itself in `__post_init__`, so that no inconsistent
    configuration exists, however it is made.
    """

    BUILT_IN: ClassVar[Mapping[str, Any]] = _NOTHING  # stands in for a file that is not given

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, Any] = _NOTHING,
        **tables: Any,
    ) -> Self:
        """Read a file, or take the built-in tables without one; variables and then flags go over it.

        >>> DriverConfig.load(overrides={"driver.control_stream_id": 2000}, shm={"namespace": "lab1"})

        Raises ConfigError.
        """
        return load(
            cls,
            path=None if path is None else Path(path),
            built_in=cls.BUILT_IN,
            environ=environ,
            overrides={**overrides, **tables},
        )

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Refuse raw tables that are wrong only because of what was given or left out. Raises ConfigError."""

    def dump(self) -> dict[str, object]:
        """Every key with its value in effect, for logs and `--check`; secrets stay hidden."""
        return dump(self)


def check(settings: msgspec.Struct) -> None:
    """Refuse a struct that was built by hand with a value that `load` would refuse. Raises ConfigError."""
    for key, leaf, value in values(settings):
        leaf.read(key, value)


def dump(settings: msgspec.Struct) -> dict[str, object]:
    """Every key with its value in effect, as TOML would have it; secrets stay hidden.

    >>> dump(config)["driver.stream_id_range"]
    '20000-29999'
    """
    return {key: plain(value) for key, _, value in values(settings)}


def known_keys(settings: type[msgspec.Struct]) -> dict[str, str | None]:
    """Every key with its environment variable, None where no variable can express it.

    >>> known_keys(DriverConfig)["profiles.<name>.header_nslots"]
    'PROFILES_<NAME>_HEADER_NSLOTS'
    """
    return {key: None if field.leaf is None or "[]" in key else env_name(key) for key, field, _ in known(settings)}


def env_name(key: str) -> str:
    """The environment variable of a key."""
    return re.sub(r"[^A-Z0-9<>]", "_", key.upper())


def lookalikes(settings: msgspec.Struct, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are almost one of ours and were therefore ignored, with ours: worth a warning.

    >>> lookalikes(config, {"DRIVER_CONTOL_STREAM_ID": "1001"})
    {'DRIVER_CONTOL_STREAM_ID': 'DRIVER_CONTROL_STREAM_ID'}
    """
    ours = {env_name(key) for key, _, _ in values(settings) if "[" not in key}
    found = {}
    for name in sorted(environ.keys() - ours):
        close = difflib.get_close_matches(name, sorted(ours), 1, 0.85)
        if close and name.partition("_")[0] == close[0].partition("_")[0]:
            found[name] = close[0]
    return found


class _Layer(msgspec.Struct, frozen=True):
    """Where values come from, as errors say it, and whether texts among them stand for other types."""

    origin: str
    has_texts: bool = False


class _Loader:
    """Collects the raw tables and where each value came from, then resolves them.

    `home` names the file, for errors that no given value causes, such as a missing table.
    """

    def __init__(self, settings: type[msgspec.Struct], home: str) -> None:
        self._home = home
        self._settings = settings
        self._raw: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def add(self, table: Mapping[str, Any], layer: _Layer) -> None:
        """Lay a table over what is there; refuses keys that do not exist."""
        try:
            self._graft(self._settings, table, self._raw, "", layer)
        except ConfigError as error:
            raise _with_origin(error, layer.origin) from None

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Lay over the variables that belong to a key; refuses one that belongs to two."""
        owners: dict[str, list[tuple[str, Leaf, dict[str, Any], str]]] = {}
        for place in _places(self._settings, self._raw, ""):
            owners.setdefault(env_name(place[0]), []).append(place)
        for variable in sorted(owners.keys() & environ.keys()):
            key, leaf, node, name = owners[variable][0]
            if len(owners[variable]) > 1:
                keys = " and ".join(place[0] for place in owners[variable])
                accepted = f"the variable of one key, not of {keys}; set them in the file or rename a table"
                raise ConfigError(variable, HIDDEN if leaf.is_secret else environ[variable], accepted)
            node[name] = leaf.from_text(environ[variable])
            self._origins[key] = f" (from the environment variable {variable})"

    def build(self) -> msgspec.Struct:
        try:
            if issubclass(self._settings, Configuration):
                self._settings.check_given(self._raw)
            return _Table(self._settings, self._raw, "").resolve()
        except ConfigError as error:
            raise _with_origin(error, self._origin(error.key)) from None

    def _graft(
        self, struct: type[msgspec.Struct], table: Any, node: dict[str, Any], prefix: str, layer: _Layer
    ) -> None:
        declared = fields(struct)
        for name, value in _as_table(prefix, table, f"with {', '.join(declared)}").items():
            if name not in declared:
                raise self._unknown(prefix, name, value, declared)
            field, key = declared[name], join(prefix, name)
            if field.leaf is not None:
                is_text = layer.has_texts and isinstance(value, str)
                node[name] = field.leaf.from_text(value) if is_text else value
                self._origins[key] = layer.origin
            elif field.shape is Shape.SECTION:
                self._graft(field.struct, value, node.setdefault(name, {}), key, layer)
            elif field.shape is Shape.NAMED:
                for given, entry in _as_table(key, value, "of tables").items():
                    child = node.setdefault(name, {}).setdefault(given, {})
                    self._graft(field.struct, entry, child, join(key, given), layer)
            else:
                node[name] = [{} for _ in _as_array(key, value)]
                self._origins[key] = layer.origin
                for index, (entry, child) in enumerate(zip(value, node[name], strict=True)):
                    self._graft(field.struct, entry, child, f"{key}[{index}]", layer)

    def _unknown(self, prefix: str, name: str, value: object, declared: dict[str, Field]) -> ConfigError:
        elsewhere = [key for key, _, _ in known(self._settings) if key.rpartition(".")[2] == name]
        nearest = elsewhere or [join(prefix, near) for near in difflib.get_close_matches(name, declared, 1, 0.5)]
        what = f"a known key; the nearest is {nearest[0]}" if nearest else f"one of {', '.join(declared)}"
        # A text may be a secret whose key was misspelt.
        given = shown(value) if isinstance(value, int | float | Mapping) else HIDDEN
        return ConfigError(join(prefix, name), given, what)

    def _origin(self, key: str) -> str:
        """Where the key, or the array that holds it, was given."""
        while key and key not in self._origins:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self._origins.get(key, self._home)


class _Table:
    """A table on its way from raw to resolved: the rules of derived keys see the keys before them as attributes."""

    def __init__(
        self, struct: type[msgspec.Struct], raw: Mapping[str, Any], key: str, root: _Table | None = None
    ) -> None:
        self._struct = struct
        self._raw = raw
        self._key = key
        self._root = root or self

    def gives(self, name: str) -> bool:
        """Whether the key was given."""
        return name in self._raw

    def resolve(self) -> msgspec.Struct:
        for name, field in fields(self._struct).items():
            if field.shape is Shape.SECTION:
                table = self._child(field, self._raw.get(name, {}), name)
                setattr(self, name, table)
                setattr(self, name, table.resolve())
            elif name in self._raw:
                setattr(self, name, self._given(name, field))
            elif field.derived is not None:
                setattr(self, name, field.derived.value(self, self._root))
            elif field.is_required:
                accepted = field.leaf.accepted if field.leaf else "an array of tables"
                raise ConfigError(join(self._key, name), Note("missing"), f"{accepted}; the key is required")
            else:
                setattr(self, name, field.make_default())
        resolved = {name: getattr(self, name) for name in fields(self._struct)}
        return self._struct(**resolved)

    def _given(self, name: str, field: Field) -> Any:
        key, raw = join(self._key, name), self._raw[name]
        if field.leaf is not None:
            return field.leaf.read(key, raw)
        if field.shape is Shape.NAMED:
            return {given: self._child(field, table, join(name, given)).resolve() for given, table in raw.items()}
        return tuple(self._child(field, table, f"{name}[{index}]").resolve() for index, table in enumerate(raw))

    def _child(self, field: Field, raw: Mapping[str, Any], name: str) -> _Table:
        return _Table(field.struct, raw, join(self._key, name), self._root)


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
    field = fields(struct).get(first)
    if not rest or field is None or field.shape in (Shape.LEAF, Shape.ARRAY):
        return {key: value}
    if field.shape is Shape.SECTION:
        return {first: _nested(field.struct, rest, value)}
    name, _, last = rest.rpartition(".")
    return {first: {name: {last: value}} if name else {rest: value}}


def _places(
    struct: type[msgspec.Struct], node: dict[str, Any], prefix: str
) -> Iterator[tuple[str, Leaf, dict[str, Any], str]]:
    """Every key that a variable could set, with the table and the name to set it by."""
    for name, field in fields(struct).items():
        key = join(prefix, name)
        if field.leaf is not None:
            yield key, field.leaf, node, name
        elif field.shape is Shape.SECTION:
            yield from _places(field.struct, node.setdefault(name, {}), key)
        elif field.shape is Shape.NAMED:
            for given, child in node.get(name, {}).items():
                yield from _places(field.struct, child, join(key, given))


def _with_origin(error: ConfigError, origin: str) -> ConfigError:
    return ConfigError(error.key, error.value, error.accepted + origin)


def _as_table(key: str, value: Any, content: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(key, shown(value), f"a table {content}")
    return value


def _as_array(key: str, value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(key, shown(value), "an array of tables")
    return value
