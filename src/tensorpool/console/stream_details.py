# SPDX-License-Identifier: Apache-2.0
"""What a page shows of one stream beside the view: the slots of its ring, metadata, and memory by stream and epoch.

Reads files as `tensorpool inspect` does: nothing is mapped, no lease is taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tensorpool._core import HEADER_SLOT_BYTES, SUPERBLOCK_BYTES
from tensorpool.diagnosis.inspection import memory_bytes
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import RegionRejected
from tensorpool.shm import HeaderFile
from tensorpool.shm.containment import AllowedBases, open_region
from tensorpool.shm.epochs import scan_epochs
from tensorpool.shm.namespace import find_namespaces
from tensorpool.shm.space import mount_space
from tensorpool.wire.region_uri import RegionUri

MAX_STATES: Final = 4096
SHOWN_BYTES: Final = 64  # of an attribute that is no text


def details(view: Mapping[str, Any], stream_id: int, bases: AllowedBases, metadata: Mapping[str, Any]) -> Any:
    """A stream of the view, with everything about it; None where the view has no such stream."""
    stream = next((row for row in view["streams"] if row["stream_id"] == stream_id), None)
    if stream is None:
        return None
    return {
        "stream": stream,
        "consumers": [row for row in view["consumers"] if row["stream_id"] == stream_id],
        "leases": [row for row in view["leases"] if row["stream_id"] == stream_id],
        "metadata": {key: _plain(value) for key, value in metadata.items()},
        "slots": slots(stream, bases),
    }


def slots(stream: Mapping[str, Any], bases: AllowedBases) -> dict[str, Any] | None:
    """The ring's slots, in their order; None where the ring cannot be read."""
    uri, nslots = stream["header_region_uri"], stream["nslots"]
    if not uri or not nslots or stream["layout_flaw"] is not None:
        return None
    try:
        fd = open_region(RegionUri.parse(uri), bases, SUPERBLOCK_BYTES + nslots * HEADER_SLOT_BYTES)
    except (RegionRejected, OSError):
        return None
    try:
        words = np.array(HeaderFile(fd, nslots).commit_words(), np.uint64)
    finally:
        os.close(fd)
    states, newest = slot_states(words)
    return {"nslots": nslots, "newest": newest, "states": states}


def slot_states(words: Any) -> tuple[str, int | None]:
    """`seq_commit` of every slot, as letters: c committed, w in progress, s stale or empty; and the newest seq.

    Of a ring with more than 4096 slots a letter stands for several neighbours, for the worst of them: w, then s.
    """
    count = len(words)
    seqs = words >> np.uint64(1)
    is_placed = (seqs & np.uint64(max(count - 1, 0))) == np.arange(count, dtype=np.uint64)
    is_whole = ((words & np.uint64(1)) == 1) & is_placed
    newest = int(seqs[is_whole].max()) if is_whole.any() else None
    is_of_this_lap = seqs + np.uint64(count) > np.uint64(newest or 0)
    rank = np.where(is_whole & is_of_this_lap, 0, 1)
    rank[(words != 0) & is_placed & ~is_whole & is_of_this_lap] = 2
    if count > MAX_STATES:  # both are powers of two
        rank = rank.reshape(MAX_STATES, -1).max(axis=1)
    return "".join("csw"[number] for number in rank), newest


def memory(config: DriverConfig, view: Mapping[str, Any] | None) -> dict[str, Any]:
    """The space of shared memory, and what of it each epoch of each stream takes."""
    mount = mount_space(config.shm.base_dir)
    streams = {row["stream_id"]: row for row in (view or {}).get("streams", ())}
    found = []
    for base in dict.fromkeys(map(os.path.realpath, config.shm.allowed_base_dirs)):
        for namespace in find_namespaces(base):
            try:
                epochs = scan_epochs(namespace)
            except OSError:
                continue  # removed meanwhile, or not ours to read
            for epoch in epochs:
                known = streams.get(epoch.stream_id)
                found.append(
                    {
                        "stream_id": epoch.stream_id,
                        "name": None if known is None else known["name"],
                        "epoch": epoch.epoch,
                        "bytes": memory_bytes(epoch.path),
                        "is_current": known is not None and known["epoch"] == epoch.epoch and not epoch.is_retired,
                    }
                )
    return {
        "path": mount.mount_point,
        "total_bytes": mount.total_bytes,
        "free_bytes": mount.free_bytes,
        "streams": found,
    }


def _plain(value: Any) -> Any:
    return {"bytes": len(value), "hex": value[:SHOWN_BYTES].hex()} if isinstance(value, bytes) else value
