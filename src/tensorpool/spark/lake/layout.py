# SPDX-License-Identifier: Apache-2.0
"""Where things are in a lake.

    LAKE/_lake.json                                     what this directory is
    LAKE/stream_id=10000/epoch=3/part-….parquet         frames
    LAKE/_tables/qos/part-….parquet                     what was heard beside them
    LAKE/_manifest/00000000000000000042.json            one commit: what came, what went
    LAKE/_manifest/00000000000000000042.state           all commits up to this one, in sum
    LAKE/_staging/<query>/<batch>/…                     files on their way in
    LAKE/_checkpoints/<name>/                           checkpoints of recordings: Spark's, or tail.json

Only files that the manifest names are part of the lake. Names that begin with "_" are invisible to Parquet readers.
"""

from __future__ import annotations

import re
from typing import Final

FORMAT: Final = "tensorpool.lake"
VERSION: Final = 1

MARK: Final = "_lake.json"
MANIFEST: Final = "_manifest"
STAGING: Final = "_staging"
TABLES: Final = "_tables"
CHECKPOINTS: Final = "_checkpoints"
TAIL: Final = "tail.json"

_COMMIT: Final = re.compile(r"(?P<number>[0-9]{20})\.(?P<kind>json|state)")
_STAGED: Final = re.compile(r"(?P<stream>[0-9]+)-(?P<epoch>[0-9]+)-(?P<lo>[0-9]+)-(?P<hi>[0-9]+)\.parquet")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def frames_path(stream_id: int, epoch: int, lo: int, hi: int, unique: str) -> str:
    """A file of frames `lo` up to, not including, `hi`."""
    return f"stream_id={stream_id}/epoch={epoch}/part-{lo:010d}-{hi:010d}-{unique}.parquet"


def table_path(table: str, unique: str) -> str:
    return f"{TABLES}/{table}/part-{unique}.parquet"


def commit_name(number: int) -> str:
    return f"{number:020d}.json"


def state_name(number: int) -> str:
    return f"{number:020d}.state"


def manifest_entry(name: str) -> tuple[str, int] | None:
    """("json" or "state", number) of a file in the manifest's directory; None for what is neither."""
    match = _COMMIT.fullmatch(name)
    return None if match is None else (match["kind"], int(match["number"]))


def staged_name(stream_id: int, epoch: int, lo: int, hi: int) -> str:
    return f"{stream_id}-{epoch}-{lo}-{hi}.parquet"


def staged_entry(name: str) -> tuple[int, int, int, int] | None:
    """(stream_id, epoch, lo, hi) of a staged file; None for one that is still being written."""
    match = _STAGED.fullmatch(name)
    return None if match is None else (int(match["stream"]), int(match["epoch"]), int(match["lo"]), int(match["hi"]))


def is_plain_name(name: str) -> bool:
    """Whether a name can be that of a directory in the lake, wherever it came from."""
    return _NAME.fullmatch(name) is not None
