# SPDX-License-Identifier: Apache-2.0
"""Where a recorded frame came from: links are in the table "traces" of a lake, ids in the column of its frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensorpool.client.lineage import MAX_DEPTH, FramePlace, TraceStep, trace_steps, with_frames
from tensorpool.lake.lake import Lake
from tensorpool.lake.manifest import LakeFile

_LINKS: Final = ["stream_id", "epoch", "seq", "trace_id", "parent_id"]


class RecordedLinks:
    """The links of a lake, of one stream or of all, kept in 40 bytes each."""

    def __init__(self, lake: Lake, stream_id: int | None = None) -> None:
        tables = [lake.open_parquet(file.path).read(_LINKS) for file in lake.tables("traces")]
        links = pa.concat_tables(tables) if tables else pa.table({name: pa.array([], pa.int64()) for name in _LINKS})
        if stream_id is not None:
            links = links.filter(pc.equal(links["stream_id"], stream_id))
        links = links.drop_null()
        order = np.argsort(links["trace_id"].to_numpy(), kind="stable")  # parents stay in their order
        self._columns: Final = {name: links[name].to_numpy()[order] for name in _LINKS}

    def parents_of(self, trace_id: int) -> list[int]:
        """Each once, in the order in which the producer gave them."""
        return list(dict.fromkeys(self._columns["parent_id"][self._range(trace_id)].tolist()))

    def frames_of(self, trace_id: int) -> list[FramePlace]:
        """The frames that were published with parents and this id."""
        part = self._range(trace_id)
        rows = zip(*(self._columns[name][part].tolist() for name in _LINKS[:3]), strict=True)
        return [FramePlace(*row) for row in dict.fromkeys(rows)]

    def _range(self, trace_id: int) -> slice:
        ids = self._columns["trace_id"]
        return slice(*np.searchsorted(ids, [trace_id, trace_id + 1]).tolist())


def trace_lake(lake: Lake, trace_id: int, *, max_depth: int = MAX_DEPTH) -> list[TraceStep]:
    """The ancestors of a frame, as far as a lake has recorded them.

    >>> for step in trace_lake(Lake.open("/data/lake"), 1873460294123):                       # doctest: +SKIP
    ...     print(step.depth, step.trace_id, step.frames)

    Raises LakeDamaged.
    """
    links = RecordedLinks(lake)
    steps = trace_steps(trace_id, links.parents_of, max_depth)
    ids = {step.trace_id for step in steps}
    places: dict[int, dict[FramePlace, FramePlace]] = defaultdict(dict)
    for one in ids:
        places[one] = {place: place for place in links.frames_of(one)}
    for file in lake.files():
        for one, place in _recorded(lake, file, ids):
            places[one][FramePlace(place.stream_id, place.epoch, place.seq)] = place
    return with_frames(steps, {one: list(found.values()) for one, found in places.items()})


def _recorded(lake: Lake, file: LakeFile, ids: Collection[int]) -> list[tuple[int, FramePlace]]:
    """The frames of a file that have one of the ids. Row groups without any, by their statistics, are not read."""
    parquet = lake.open_parquet(file.path)
    column = [parquet.schema.column(index).path for index in range(len(parquet.schema))].index("trace_id")
    groups = []
    for group in range(parquet.metadata.num_row_groups):
        found = parquet.metadata.row_group(group).column(column).statistics
        is_empty = found is not None and found.num_values == 0
        may_have = found is None or not found.has_min_max or any(found.min <= one <= found.max for one in ids)
        if may_have and not is_empty:
            groups.append(group)
    if not groups:
        return []
    rows = parquet.read_row_groups(groups, ["seq", "time", "trace_id"], use_threads=False)
    rows = rows.filter(pc.is_in(rows["trace_id"], pa.array(sorted(ids), pa.int64())))
    return [
        (row["trace_id"], FramePlace(file.stream_id, file.epoch, row["seq"], row["time"])) for row in rows.to_pylist()
    ]
