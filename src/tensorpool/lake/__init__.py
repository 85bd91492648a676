# SPDX-License-Identifier: Apache-2.0
"""Recordings: ring reading, offsets, files and their log, recorder, replay and pictures. Imports no pyspark."""

from tensorpool import extras

extras.require("a lake", "lake", "pyarrow", "obstore")

from tensorpool.lake.errors import LakeConflict, LakeDamaged  # noqa: E402
from tensorpool.lake.lake import Lake, RecordedAttribute, RecordedMetadata  # noqa: E402
from tensorpool.lake.manifest import UNKNOWN_TAIL, UNSEEN_EPOCHS, Gap, LakeFile  # noqa: E402

__all__ = [
    "UNKNOWN_TAIL",
    "UNSEEN_EPOCHS",
    "Gap",
    "Lake",
    "LakeConflict",
    "LakeDamaged",
    "LakeFile",
    "RecordedAttribute",
    "RecordedMetadata",
]
