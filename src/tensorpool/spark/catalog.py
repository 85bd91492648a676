# SPDX-License-Identifier: Apache-2.0
"""Tables of Spark's catalog: `CREATE TABLE front USING tensorpool OPTIONS (streams 'camera/front')`.

Spark hands a table's options to a Python source only when the table is created, among properties of its own. Later the
source gets nothing but the schema that it gave then. So the schema carries the options, in the metadata of its first
column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

KEY: Final = "tensorpool.options"
OWN: Final = "option."  # before what the user has given; everything else is Spark's, or a property of the table

_TYPES: Final[dict[str, DataType]] = {
    "ARRAY<INT>": ArrayType(IntegerType()),
    "BIGINT": LongType(),
    "BINARY": BinaryType(),
    "BOOLEAN": BooleanType(),
    "STRING": StringType(),
    "TIMESTAMP": TimestampType(),
    "VARIANT": VariantType(),
}


def options_given(given: Mapping[str, str], schema: StructType | None = None) -> dict[str, str]:
    """The options that a user has given, to a read or to the table that is created or read."""
    if is_table(given):
        place = {"path": given["path"]} if "path" in given else {}
        return place | {key.removeprefix(OWN): text for key, text in given.items() if key.startswith(OWN)}
    kept = schema[0].metadata.get(KEY) if schema is not None and len(schema) else None
    table: dict[str, str] = {} if kept is None else json.loads(kept)
    names = {key.lower() for key in given}
    return {key: text for key, text in table.items() if key.lower() not in names} | dict(given)


def is_table(given: Mapping[str, str]) -> bool:
    """Whether these are the properties of a table that is being created."""
    return "provider" in given and "owner" in given


def schema_for(ddl: str, given: Mapping[str, str]) -> str | StructType:
    """What a source answers when it is asked for its schema: for a table, with the table's options in it."""
    if not is_table(given):
        return ddl
    kept = {KEY: json.dumps(options_given(given), sort_keys=True)}
    fields = [column.rsplit(" ", 1) for column in ddl.split(", ")]
    return StructType(
        [
            StructField(name.strip("`"), _TYPES[kind], True, kept if index == 0 else None)
            for index, (name, kind) in enumerate(fields)
        ]
    )
