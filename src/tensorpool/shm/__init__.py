# SPDX-License-Identifier: Apache-2.0
"""Shared memory: the only code that opens, maps, allocates or unlinks region files.

layout        sizes and superblocks                    permission   modes, and words for who may not
containment   opening a path that a peer announced     space        the bill against what is free
region        one mapped file                          namespace    a driver's own directory, locked
ring          an epoch's files together                epochs       a directory per epoch, created and retired
arrays        numpy over payloads                      liveness     is a region's owner still there?
headers       a header ring without mapping it         leftovers    what dead processes left
"""

from typing import TYPE_CHECKING

from tensorpool import lazy
from tensorpool.shm.containment import AllowedBases, Check
from tensorpool.shm.epochs import EpochTree, FoundEpoch, scan_epochs
from tensorpool.shm.headers import HeaderFile
from tensorpool.shm.layout import LAYOUT_VERSION, MAGIC, PoolSpec, RegionSpec, RingSpec
from tensorpool.shm.leftovers import dead_epochs, remove_dead_epochs
from tensorpool.shm.liveness import Liveness, activity_age_ns, liveness_of
from tensorpool.shm.namespace import find_namespaces, namespace_path
from tensorpool.shm.region import Backing, Region, create_region, map_region
from tensorpool.shm.ring import MappedRing, map_ring
from tensorpool.shm.space import MountSpace, mount_space

if TYPE_CHECKING:
    from tensorpool.shm.arrays import dtype_of, layout_for, layout_of, numpy_dtype, view_of, view_of_frame

__all__ = [
    "LAYOUT_VERSION",
    "MAGIC",
    "AllowedBases",
    "Backing",
    "Check",
    "EpochTree",
    "FoundEpoch",
    "HeaderFile",
    "Liveness",
    "MappedRing",
    "MountSpace",
    "PoolSpec",
    "Region",
    "RegionSpec",
    "RingSpec",
    "activity_age_ns",
    "create_region",
    "dead_epochs",
    "dtype_of",
    "find_namespaces",
    "layout_for",
    "layout_of",
    "liveness_of",
    "map_region",
    "map_ring",
    "mount_space",
    "namespace_path",
    "numpy_dtype",
    "remove_dead_epochs",
    "scan_epochs",
    "view_of",
    "view_of_frame",
]

_ARRAYS = ("dtype_of", "layout_for", "layout_of", "numpy_dtype", "view_of", "view_of_frame")

if not TYPE_CHECKING:
    __getattr__ = lazy.exports(__name__, dict.fromkeys(_ARRAYS, "tensorpool.shm.arrays"))
