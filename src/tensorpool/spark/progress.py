# SPDX-License-Identifier: Apache-2.0
"""How a streaming query is doing: frames, bytes, gaps and lag, out of Spark's own progress reports.

Spark reports the offsets and the rows of every batch, and what our sources say is the latest offset; the rest follows.
Bytes are counted where `with_metrics` is used. The same in a session of one's own and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sql

from tensorpool.lake.offsets import Offsets, span

METRICS: Final = "tensorpool"


class Progress(msgspec.Struct, frozen=True):
    """Of one batch, or of several added up."""

    frames: int = 0  # delivered
    gaps: int = 0  # frames that should have been delivered and were lost
    lag: int = 0  # frames that are published and not yet read; of a lake, commits
    nbytes: int | None = None  # of the payloads; None without `with_metrics`
    seconds: float = 0.0  # that the batches took

    def __add__(self, later: Progress) -> Progress:
        counted = None if self.nbytes is None and later.nbytes is None else (self.nbytes or 0) + (later.nbytes or 0)
        seconds = self.seconds + later.seconds
        return Progress(self.frames + later.frames, self.gaps + later.gaps, later.lag, counted, seconds)


def with_metrics(frames: DataFrame) -> DataFrame:
    """Have Spark count bytes on the way: they appear in the progress of the query.

    >>> query = with_metrics(frames).writeStream.format("noop").start()     # doctest: +SKIP
    >>> progress_of(query).nbytes                                           # doctest: +SKIP
    """
    return frames.observe(
        METRICS,
        sql.coalesce(sql.sum("nbytes"), sql.lit(0)).alias("nbytes"),
        sql.coalesce(sql.sum("dropped_before"), sql.lit(0)).alias("dropped"),
    )


def progress_of(query: Any) -> Progress:
    """How a query that reads frames is doing: over all batches that Spark still remembers, or in one report of it.

    >>> progress_of(query)                                                  # doctest: +SKIP
    Progress(frames=412, gaps=0, lag=3, nbytes=None, seconds=0.41)
    >>> progress_of(query.lastProgress)                                     # doctest: +SKIP

    Gaps are what lies between the offsets of a batch less the rows that came: exact, unless the query reads a batch
    twice, as a sort or two actions in foreachBatch do. Of the first batch, which has no start, and of lakes, gaps are
    known with `with_metrics` only. Those of a query with table "ranges" are in its rows, not here.
    """
    if hasattr(query, "recentProgress"):
        return total_of(query.recentProgress)
    if query is None:  # the last progress of a query that has not had a batch yet
        return Progress()
    report: Mapping[str, Any] = query if isinstance(query, Mapping) else json.loads(query.json)
    observed = _named(report.get("observedMetrics", {}).get(METRICS))
    found = [_of_source(source, observed.get("dropped", 0)) for source in report["sources"]]
    return Progress(
        frames=sum(one.frames for one in found),
        gaps=sum(one.gaps for one in found),
        lag=sum(one.lag for one in found),
        nbytes=observed.get("nbytes"),
        seconds=report.get("batchDuration", 0) / 1000,
    )


def _of_source(source: Mapping[str, Any], dropped: int) -> Progress:
    """Of one that is ours; of any other nothing. `dropped` is what the rows say."""
    start, end, latest = (_decoded(source.get(name)) for name in ("startOffset", "endOffset", "latestOffset"))
    frames = source["numInputRows"]
    if _is_lake(end):
        return Progress(frames, dropped, latest["commit"] - end["commit"] if _is_lake(latest) else 0)
    if not _is_live(end):
        return Progress()
    until = Offsets.from_json(end)
    lost = max(0, span(Offsets.from_json(start), until) - frames) if _is_live(start) else dropped
    return Progress(frames, lost, span(until, Offsets.from_json(latest)) if _is_live(latest) else 0)


def total_of(reports: Iterable[Any]) -> Progress:
    """Of all batches that Spark still remembers: `total_of(query.recentProgress)`."""
    total = Progress()
    for report in reports:
        total += progress_of(report)
    return total


def _named(observed: Any) -> Mapping[str, Any]:
    """Observed metrics by name. Over Spark Connect a row of them comes as its values beside its schema."""
    if observed is None:
        return {}
    fields: Mapping[str, Any] = observed.asDict() if isinstance(observed, Row) else observed
    if fields.keys() == {"values", "schema"}:
        return dict(zip((field["name"] for field in fields["schema"]["fields"]), fields["values"], strict=True))
    return fields


def _decoded(offset: Any) -> Any:
    return json.loads(offset) if isinstance(offset, str) and offset else offset


def _is_live(offset: Any) -> bool:
    return isinstance(offset, Mapping) and all(isinstance(it, dict) and "epoch" in it for it in offset.values())


def _is_lake(offset: Any) -> bool:
    return isinstance(offset, Mapping) and offset.keys() == {"commit"}
