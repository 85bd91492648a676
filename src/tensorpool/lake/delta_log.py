# SPDX-License-Identifier: Apache-2.0
"""The actions of a Delta log, as structs and as the JSON lines of a log entry. Does no IO.

An entry is one version of a table: a line per action. Written are tables of reader version 1 and writer version 2,
which every Delta reader understands; read are the same. What else another writer adds to an action is ignored, an
action or a table feature that would change which rows there are is refused.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

READER_VERSION: Final = 1
WRITER_VERSION: Final = 2
FOLDER: Final = "_delta_log"
LAST_CHECKPOINT: Final = f"{FOLDER}/_last_checkpoint"

_ENTRY: Final = re.compile(r"(?P<version>[0-9]{20})\.json")
_CHECKPOINT: Final = re.compile(r"(?P<version>[0-9]{20})\.checkpoint\.parquet")


class Format(msgspec.Struct, frozen=True):
    """Of the data files; Parquet is the only one."""

    provider: str = "parquet"
    options: dict[str, str] = {}


class Protocol(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Which versions of the Delta protocol a reader and a writer need."""

    min_reader_version: int
    min_writer_version: int
    reader_features: tuple[str, ...] | None = None
    writer_features: tuple[str, ...] | None = None


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """What a table is: its id, which no other table has, its columns, and its properties."""

    id: str
    schema_string: str
    partition_columns: tuple[str, ...] = ()
    configuration: dict[str, str] = {}
    created_time: int | None = None
    name: str | None = None
    description: str | None = None
    format: Format = Format()


class AddFile(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A file that is part of the table from this version on. `stats` is JSON, as in the log."""

    path: str
    partition_values: dict[str, str | None]
    size: int
    modification_time: int  # ms, wall clock
    data_change: bool = True
    stats: str | None = None
    tags: dict[str, str] | None = None
    deletion_vector: dict[str, object] | None = None


class RemoveFile(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A file that is no part of the table any more. Readers of earlier versions may still need it."""

    path: str
    deletion_timestamp: int | None = None  # ms, wall clock
    data_change: bool = True
    extended_file_metadata: bool | None = None
    partition_values: dict[str, str | None] | None = None
    size: int | None = None


class Txn(msgspec.Struct, frozen=True, rename="camel"):
    """How far an application has come; the newest of an `app_id` counts."""

    app_id: str
    version: int
    last_updated: int | None = None


class CommitInfo(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Who made this version, when and why. Gone once the entry is."""

    timestamp: int = 0  # ms, wall clock
    operation: str = ""
    operation_parameters: dict[str, object] = {}
    engine_info: str = ""
    txn_id: str = ""


type Action = Protocol | Metadata | AddFile | RemoveFile | Txn | CommitInfo


class _Line(msgspec.Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """One line of an entry: exactly one of these is there."""

    protocol: Protocol | None = None
    meta_data: Metadata | None = None
    add: AddFile | None = None
    remove: RemoveFile | None = None
    txn: Txn | None = None
    commit_info: CommitInfo | None = None
    cdc: msgspec.Raw | None = None  # change data beside the table: not rows of it
    domain_metadata: msgspec.Raw | None = None


_FIELDS: Final = {
    Protocol: "protocol",
    Metadata: "metaData",
    AddFile: "add",
    RemoveFile: "remove",
    Txn: "txn",
    CommitInfo: "commitInfo",
}
_decoder: Final = msgspec.json.Decoder(_Line)


def entry_name(version: int) -> str:
    return f"{FOLDER}/{version:020d}.json"


def checkpoint_name(version: int) -> str:
    return f"{FOLDER}/{version:020d}.checkpoint.parquet"


def entry_version(name: str) -> int | None:
    """The version of a log entry by its file name; None for another file."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else int(match["version"])


def checkpoint_version(name: str) -> int | None:
    """The version of a checkpoint in one file by its name; None for another file."""
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match["version"])


def encode_entry(actions: Iterable[Action]) -> bytes:
    """A log entry."""
    return b"".join(msgspec.json.encode({_FIELDS[type(action)]: action}) + b"\n" for action in actions)


def decode_entry(data: bytes) -> list[Action]:
    """The actions of a log entry. Raises ValueError, in words, where it is torn or not ours to understand."""
    if not data.strip():
        raise ValueError("it is empty")
    actions: list[Action] = []
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            found = _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"it is torn or no entry of a Delta log ({error})") from None
        parts = (found.protocol, found.meta_data, found.add, found.remove, found.txn, found.commit_info)
        actions += [part for part in parts if part is not None]
    for action in actions:
        check_understood(action)
    return actions


def check_understood(action: Action) -> None:
    """Raises ValueError for an action that says that the table needs more than we do."""
    if isinstance(action, Protocol) and (
        action.min_reader_version > READER_VERSION or action.min_writer_version > WRITER_VERSION
    ):
        needs = f"reader version {action.min_reader_version} and writer version {action.min_writer_version}"
        raise ValueError(f"the table needs Delta {needs}; tensorpool has {READER_VERSION} and {WRITER_VERSION}")
    if isinstance(action, AddFile) and action.deletion_vector is not None:
        raise ValueError(f"{action.path} has a deletion vector, which tensorpool does not read")


class Column(msgspec.Struct, frozen=True):
    """A column of a table: `type` is Delta's name of it, such as "long"; of arrays "array<integer>"."""

    name: str
    type: str


def schema_string(columns: Sequence[Column]) -> str:
    """The schema of a table, as its metadata has it. Every column can be null."""
    fields = [
        {"name": column.name, "type": _type_of(column.type), "nullable": True, "metadata": {}} for column in columns
    ]
    return msgspec.json.encode({"type": "struct", "fields": fields}).decode()


def _type_of(name: str) -> object:
    if name.startswith("array<"):
        return {"type": "array", "elementType": name[len("array<") : -1], "containsNull": True}
    return name


def new_table(
    columns: Sequence[Column],
    *,
    partition_by: Sequence[str] = (),
    now_ms: int,
    properties: dict[str, str] | None = None,
) -> list[Action]:
    """What the first entry of a table says."""
    return [
        Protocol(READER_VERSION, WRITER_VERSION),
        Metadata(
            str(uuid.uuid4()),
            schema_string(columns),
            tuple(partition_by),
            configuration=properties or {},
            created_time=now_ms,
        ),
    ]
