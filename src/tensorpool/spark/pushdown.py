# SPDX-License-Identifier: Apache-2.0
"""Filters that Spark hands to a batch read: what they say about stream, epoch, seq and time.

A filter that our readers apply to every row is theirs; all others go back to Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from tensorpool.lake.selection import Selection, time_us_of

ENABLED: Final = "spark.sql.python.filterPushdown.enabled"  # without it Spark fails reads that take filters
COLUMNS: Final = ("stream_id", "epoch", "seq", "time")


class Pushdown:
    """The `pushFilters` of a reader, and what it has come to.

    Only for reads that ask for it (`pushFilters`). Spark 4.3 keeps the last plan of a source with its DataFrame: the
    next use of the DataFrame, also within one query, reads what the filters of another use have left.
    """

    def __init__(self, selection: Selection, hints: Collection[str] = ()) -> None:
        """Filters on the columns `hints` narrow what is read, and go back to Spark all the same."""
        self.selection = selection
        self._hints = frozenset(hints)

    def __call__(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        for given in filters:
            narrower = narrowed(self.selection, given)
            if narrower is not None:
                self.selection = narrower
            if narrower is None or given.attribute[0] in self._hints:  # type: ignore[attr-defined]
                yield given


def narrowed(selection: Selection, given: Filter) -> Selection | None:
    """What is left with a filter; None where it says nothing that bounds can hold exactly."""
    match given:
        case EqualTo((name,), value) | EqualNullSafe((name,), value):
            return _with(selection, name, [value], lambda at: {"lo": at, "hi": at})
        case GreaterThan((name,), value):
            return _with(selection, name, [value], lambda at: {"lo": at + 1})
        case GreaterThanOrEqual((name,), value):
            return _with(selection, name, [value], lambda at: {"lo": at})
        case LessThan((name,), value):
            return _with(selection, name, [value], lambda at: {"hi": at - 1})
        case LessThanOrEqual((name,), value):
            return _with(selection, name, [value], lambda at: {"hi": at})
        case In((name,), values):
            known = [value for value in values if value is not None]  # nothing equals null
            return _with(selection, name, known, lambda *several: {"values": several})
    return None


def _with(selection: Selection, name: str, values: Iterable[Any], bounds: Any) -> Selection | None:
    numbers = [_number(name, value) for value in values]
    return None if None in numbers else selection.narrowed(name, **bounds(*numbers))


def _number(name: str, value: object) -> int | None:
    """A value as our bounds have it; None for a column or a type that they do not have."""
    if name == "time" and isinstance(value, datetime) and value.tzinfo is not None:
        return time_us_of(value)
    return value if name in COLUMNS and name != "time" and type(value) is int else None
