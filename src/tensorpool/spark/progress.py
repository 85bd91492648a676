# SPDX-License-Identifier: Apache-2.0
"""How a streaming query is doing: frames, bytes, gaps and lag, out of Spark's own progress reports.

Spark reports the offsets and the rows of every batch; the rest follows. Bytes are counted where `with_metrics` is used.
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
    lag: int = 0  # frames that are published and not yet read
    nbytes: int | None = None  # of the payloads; None without `with_metrics`
    seconds: float = 0.0  # that the batches took

    def __add__(self, later: Progress) -> Progress:
        counted = None if self.nbytes is None and later.nbytes is None else (self.nbytes or 0) + (later.nbytes or 0)
        seconds = self.seconds + later.seconds
        return Progress(self.frames + later.frames, self.gaps + later.gaps, later.lag, counted, seconds)


def with_metrics(frames: DataFrame) -> DataFrame:
    """Have Spark count bytes on the way: they appear in the progress of the query.

    >>> query = with_metrics(frames).writeStream.format("noop").start()     # doctest: +SKIP
    >>> progress_of(query.lastProgress).nbytes                              # doctest: +SKIP
    """
    return frames.observe(
        METRICS,
        sql.count(sql.lit(1)).alias("frames"),
        sql.coalesce(sql.sum("nbytes"), sql.lit(0)).alias("nbytes"),
        sql.coalesce(sql.sum("dropped_before"), sql.lit(0)).alias("dropped"),
    )


def progress_of(report: Any) -> Progress:
    """What a progress report of a query that reads frames says.

    >>> progress_of(query.lastProgress)                                     # doctest: +SKIP
    Progress(frames=412, gaps=0, lag=3, nbytes=None, seconds=0.41)

    Gaps are what lies between the offsets of the batch less the rows that came: exact, unless the query reads a batch
    twice, as a sort or two actions in foreachBatch do. Those of a query with table "ranges" are in its rows, not here.
    """
    told: Mapping[str, Any] = report if isinstance(report, Mapping) else json.loads(report.json)
    total = Progress(seconds=told.get("batchDuration", 0) / 1000)
    for source in told["sources"]:
        ends = {name: _offsets(source.get(name)) for name in ("startOffset", "endOffset", "latestOffset")}
        start, end, latest = ends["startOffset"], ends["endOffset"], ends["latestOffset"]
        if end is None:
            continue
        frames = source["numInputRows"]
        lost = 0 if start is None else max(0, span(start, end) - frames)
        total += Progress(frames, lost, 0 if latest is None else span(end, latest))
    observed = told.get("observedMetrics", {}).get(METRICS)
    return total if observed is None else msgspec.structs.replace(total, nbytes=_named(observed)["nbytes"])


def total_of(reports: Iterable[Any]) -> Progress:
    """Of all batches that Spark still remembers: `total_of(query.recentProgress)`."""
    total = Progress()
    for report in reports:
        total += progress_of(report)
    return total


def _named(observed: Any) -> Mapping[str, Any]:
    """Observed metrics by name. Over Spark Connect a row of them comes as its values beside its schema."""
    fields: Mapping[str, Any] = observed.asDict() if isinstance(observed, Row) else observed
    if fields.keys() == {"values", "schema"}:
        return dict(zip((field["name"] for field in fields["schema"]["fields"]), fields["values"], strict=True))
    return fields


def _offsets(value: Any) -> Offsets | None:
    data = json.loads(value) if isinstance(value, str) and value else value
    if not isinstance(data, Mapping):
        return None
    is_ours = all(isinstance(position, dict) and "epoch" in position for position in data.values())
    return Offsets.from_json(data) if is_ours else None
