# SPDX-License-Identifier: Apache-2.0
"""Do the superblocks of living epochs say what we understand, and what their files and names say?

A difference is reported field by field: what was expected, what was found, in which file. Wire §7.1, §15.1, §15.20.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final

from tensorpool._core import SUPERBLOCK_BYTES
from tensorpool.diagnosis.check_result import CheckResult, fail, ok
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import DecodeError
from tensorpool.shm.epochs import FoundEpoch, scan_epochs
from tensorpool.shm.headers import read_head
from tensorpool.shm.layout import LAYOUT_VERSION, MAGIC
from tensorpool.shm.leftovers import REGION_FILES
from tensorpool.shm.liveness import is_owner_alive
from tensorpool.shm.namespace import find_namespaces
from tensorpool.wire.control import RegionType, ShmRegionSuperblock

CHECK: Final = "layouts"
MAX_SHOWN: Final = 10


def check_layouts(config: DriverConfig) -> list[CheckResult]:
    """Every region of every epoch whose owner lives, below our base directories."""
    checked, findings = 0, []
    for epoch in _epochs(config):
        for name in sorted(_region_names(epoch.path)):
            path = os.path.join(epoch.path, name)
            try:
                data, file_bytes = read_head(path)
            except OSError:
                continue  # retired meanwhile, or not ours to read, which another check reports
            is_living, differences = _differences(epoch, name, data, file_bytes)
            if is_living:
                checked += 1
            if is_living and differences:
                findings.append(fail(CHECK, f"{path}: {'; '.join(differences)}", _remedy(differences)))
    if findings:
        return findings[:MAX_SHOWN]
    return [ok(CHECK, f"{checked} living regions, all with layout version {LAYOUT_VERSION}, as this tensorpool")]


def _epochs(config: DriverConfig) -> Iterator[FoundEpoch]:
    for base in dict.fromkeys(map(os.path.realpath, config.shm.allowed_base_dirs)):
        for namespace in find_namespaces(base):
            try:
                yield from (epoch for epoch in scan_epochs(namespace) if not epoch.is_retired)
            except OSError:
                continue


def _region_names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if REGION_FILES.fullmatch(name)]
    except OSError:
        return []


def _differences(epoch: FoundEpoch, name: str, data: bytes, file_bytes: int) -> tuple[bool, list[str]]:
    """Whether the region's owner lives, and what is wrong with it. One that is still being made is ignored."""
    magic = int.from_bytes(data[:8], "little")
    if magic == 0 or len(data) < SUPERBLOCK_BYTES:
        return False, []
    if magic != MAGIC:
        return True, [f"magic: expected {MAGIC:#018x}, found {magic:#018x}"]
    try:
        superblock = ShmRegionSuperblock.decode_body(data)
    except DecodeError as error:
        return True, [error.what]
    is_ring = name == "header.ring"
    slot_bytes = 256 if is_ring else superblock.stride_bytes
    expected = [
        ("layout_version", LAYOUT_VERSION, superblock.layout_version),
        ("stream_id", epoch.stream_id, superblock.stream_id),
        ("epoch", epoch.epoch, superblock.epoch),
        (
            "region_type",
            (RegionType.HEADER_RING if is_ring else RegionType.PAYLOAD_POOL).name,
            superblock.region_type.name,
        ),
        ("pool_id", 0 if is_ring else int(name.removesuffix(".pool")), superblock.pool_id),
    ]
    if is_ring:
        expected.append(("slot_bytes", slot_bytes, superblock.slot_bytes))
    wrong = [f"{field}: expected {want}, found {got}" for field, want, got in expected if want != got]
    needed = SUPERBLOCK_BYTES + superblock.nslots * slot_bytes
    if file_bytes < needed:
        wrong.append(f"file size: expected at least {needed} bytes for {superblock.nslots} slots, found {file_bytes}")
    return is_owner_alive(superblock, time.monotonic_ns(), time.time_ns()), wrong


def _remedy(differences: list[str]) -> str:
    if any(text.startswith("layout_version") for text in differences):
        return "update the older side: its driver and this tensorpool have to speak the same layout version"
    return "restart the driver that owns it    (it makes new files); find out who else writes there"
