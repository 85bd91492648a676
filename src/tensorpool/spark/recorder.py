# SPDX-License-Identifier: Apache-2.0
"""Recording live streams to a lake with Spark: its tasks read shared memory and write Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from tensorpool.errors import ConfigError
from tensorpool.lake import layout
from tensorpool.lake.recorder import RecorderBase
from tensorpool.lake.recording_engine import Engine, RecordingFailed, Settings
from tensorpool.spark.recording_query import RecordingQuery

__all__ = ["Recorder", "RecordingFailed", "Settings"]


class Recorder(RecorderBase):
    """Records streams until it is stopped.

    >>> with Recorder(spark, ["camera/front"], "/data/lake") as recorder:      # doctest: +SKIP
    ...     recorder.wait(60)
    >>> print(recorder.totals().frames)                                        # doctest: +SKIP
    """

    def __init__(
        self,
        spark: SparkSession,
        streams: Sequence[int | str],
        lake: Path | str,
        *,
        name: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._spark = spark
        super().__init__(streams, lake, name=name, settings=settings)

    def _new_engine(self) -> Engine:
        if layout.engine_of(self.checkpoint) == "direct":
            raise ConfigError("name", self.name, "a recording that was not begun with --direct, or another name")
        return RecordingQuery(self._spark, self.lake, self.name, self.stream_ids, self.settings)
