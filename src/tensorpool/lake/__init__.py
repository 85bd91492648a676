# SPDX-License-Identifier: Apache-2.0
"""Recordings: ring reading, offsets, files and their log, recorder, replay and pictures. Imports no pyspark."""

from tensorpool.lake.errors import LakeConflict, LakeDamaged
from tensorpool.lake.lake import Lake, RecordedAttribute, RecordedMetadata
from tensorpool.lake.manifest import UNKNOWN_TAIL, UNSEEN_EPOCHS, Gap, LakeFile

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
