# SPDX-License-Identifier: Apache-2.0
"""Where things are in a lake.

    LAKE/_delta_log/00000000000000000042.json           version 42: what came, what went
    LAKE/_delta_log/….checkpoint.parquet                all versions up to one, in sum
    LAKE/stream_id=10000/epoch=3/part-….parquet         frames
    LAKE/_tables/qos/                                   what was received beside them: a Delta table of its own
    LAKE/_staging/<query>/<batch>/…                     files on their way in
    LAKE/_checkpoints/<name>/                           checkpoints of recordings: Spark's, or direct.json

Only files that the log names are part of the lake. Names that begin with "_" are invisible to Parquet readers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

VERSION: Final = "1"  # of what tags and transactions mean
VERSION_KEY: Final = "tensorpool.lake"  # among the properties of the table

OLD_MARK: Final = "_lake.json"  # of the format before Delta, which was never released
STAGING: Final = "_staging"
TABLES: Final = "_tables"
SIDE_TABLES: Final = ("metadata", "qos", "traces")  # the tables there
CHECKPOINTS: Final = "_checkpoints"
WORK_FOLDERS: Final = (STAGING, CHECKPOINTS)  # of a lake in a bucket on a local disk
DIRECT: Final = "direct.json"  # in a checkpoint: it is that of a recording without Spark
SPARK: Final = "offsets"  # in a checkpoint: it is Spark's

_IDS: Final = re.compile(r"(?:.*/)?stream_id=(?P<stream>[0-9]+)/epoch=(?P<epoch>[0-9]+)/[^/]+")
_STAGED: Final = re.compile(r"(?P<stream>[0-9]+)-(?P<epoch>[0-9]+)-(?P<lo>[0-9]+)-(?P<hi>[0-9]+)\.parquet")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def frames_path(stream_id: int, epoch: int, lo: int, hi: int, unique: str) -> str:
    """A file of frames `lo` up to, not including, `hi`."""
    return f"stream_id={stream_id}/epoch={epoch}/part-{lo:010d}-{hi:010d}-{unique}.parquet"


def ids_in_path(path: str) -> tuple[int, int] | None:
    """Stream and epoch of a file of frames, by the folders that it is in."""
    match = _IDS.fullmatch(path)
    return None if match is None else (int(match["stream"]), int(match["epoch"]))


def table_folder(table: str) -> str:
    return f"{TABLES}/{table}"


def staged_name(stream_id: int, epoch: int, lo: int, hi: int) -> str:
    return f"{stream_id}-{epoch}-{lo}-{hi}.parquet"


def staged_entry(name: str) -> tuple[int, int, int, int] | None:
    """(stream_id, epoch, lo, hi) of a staged file; None for one that is still being written."""
    match = _STAGED.fullmatch(name)
    return None if match is None else (int(match["stream"]), int(match["epoch"]), int(match["lo"]), int(match["hi"]))


def is_plain_name(name: str) -> bool:
    """Whether a name can be that of a directory in the lake, wherever it came from."""
    return _NAME.fullmatch(name) is not None


def engine_of(checkpoint: Path) -> Literal["spark", "direct"] | None:
    """Which engine a recording was begun with; None for one that was not begun."""
    if (checkpoint / DIRECT).exists():
        return "direct"
    return "spark" if (checkpoint / SPARK).exists() else None
