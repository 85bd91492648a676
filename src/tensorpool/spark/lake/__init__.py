# SPDX-License-Identifier: Apache-2.0
"""Recordings: Parquet files with an atomic manifest, read and written by Spark or without it."""

from tensorpool.spark.lake.errors import LakeConflict, LakeDamaged
from tensorpool.spark.lake.lake import Lake, RecordedAttribute, RecordedMetadata
from tensorpool.spark.lake.manifest import UNKNOWN_TAIL, UNSEEN_EPOCHS, Gap, LakeFile

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
