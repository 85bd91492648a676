# SPDX-License-Identifier: Apache-2.0
"""What functions of a stream remember from batch to batch: Spark's transformWithState, a value per stream and epoch.

Spark keeps such state in RocksDB only, which a session must choose before the query starts; ours do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tensorpool.errors import ConfigError

STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"
ROCKS_DB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

GAPS_DDL: Final = "stream_id BIGINT, epoch BIGINT, lo BIGINT, hi BIGINT, frames BIGINT"
LAG_COLUMNS: Final = (
    "received_ns",
    "stream_id",
    "epoch",
    "client_id",
    "seq",
    "producer_seq",
    "lag",
    "drops_gap",
    "drops_late",
)
LAG_DDL: Final = ", ".join(f"{name} BIGINT" for name in LAG_COLUMNS)


def with_state(function: str, rows: DataFrame, processor: StatefulProcessor, ddl: str) -> DataFrame:
    """The rows of a stream through a processor, by stream and epoch. Raises ConfigError for a session without RocksDB.

    `function` is the name by which the user called.
    """
    found = rows.sparkSession.conf.get(STATE_STORE, None)
    if found != ROCKS_DB:
        raise ConfigError(
            f"{function} on a stream: {STATE_STORE}",
            found,
            f'{ROCKS_DB}: tensorpool.spark.session() sets it; in a session of your own, spark.conf.set("{STATE_STORE}",'
            f' "{ROCKS_DB}") before you start the query',
        )
    grouped: Any = rows.groupBy("stream_id", "epoch")
    result: DataFrame = grouped.transformWithStateInPandas(processor, ddl, "append", "None")
    return result


class _OneNumber(StatefulProcessor):
    """Base of a processor that remembers one number of each stream and epoch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("number", "number BIGINT")

    @property
    def number(self) -> int | None:
        found = self._state.get()
        return None if found is None else int(found[0])

    @number.setter
    def number(self, value: int) -> None:
        self._state.update((value,))


class Gaps(_OneNumber):
    """The seqs that are missing; remembers the newest. Seqs come in order from batch to batch, in any within one."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N803
        import pandas as pd

        before = self.number
        parts = [part["seq"].to_numpy() for part in rows]
        seqs = np.sort(np.concatenate(parts if before is None else [[before], *parts]))
        self.number = int(seqs[-1])
        at = np.flatnonzero(np.diff(seqs) > 1)
        lo, hi = seqs[at] + 1, seqs[at + 1]
        yield pd.DataFrame({"stream_id": key[0], "epoch": key[1], "lo": lo, "hi": hi, "frames": hi - lo})


class Lag(_OneNumber):
    """How far consumers are behind; remembers the newest seq that the producer has reported."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N803
        import pandas as pd

        reports = pd.concat(rows).sort_values(["received_ns", "kind"], ascending=[True, False], kind="stable")
        newest = reports["seq"].where(reports["kind"] == "producer").cummax().ffill()
        before = self.number
        if before is not None:
            newest = newest.fillna(before).clip(lower=before)
        if newest.notna().any():
            self.number = int(newest.max())
        reports["producer_seq"] = newest.astype("Int64")
        reports["lag"] = (reports["producer_seq"] - reports["seq"]).clip(lower=0)
        yield reports.loc[reports["kind"] == "consumer", list(LAG_COLUMNS)]
