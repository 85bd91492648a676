# SPDX-License-Identifier: Apache-2.0
"""Is there room in shared memory for what the configuration promises? Decisions B22, D10."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from tensorpool.diagnosis.check_result import CheckResult, fail, ok, size, warn
from tensorpool.driver.config import DriverConfig
from tensorpool.shm.leftovers import BLOCK_BYTES
from tensorpool.shm.namespace import namespace_path
from tensorpool.shm.space import mount_space

CHECK: Final = "space"
AERON_CHECK: Final = "aeron space"
DOCKER_DEFAULT_BYTES: Final = 64 << 20
MIB: Final = 1 << 20
AERON_BYTES: Final = 64 * MIB  # for the logs of one more client with a producer (40 MiB), and what grows beside them


def check_space(config: DriverConfig) -> CheckResult:
    """The bill against what the mount has left; what the driver has taken already counts as paid."""
    bill = config.bill()
    mount = mount_space(config.shm.base_dir)
    at = mount.mount_point
    if mount.free_bytes is None or mount.total_bytes is None:
        return ok(CHECK, f"{at} has no limit of its own; the configured streams need {size(bill.epoch_bytes)}")
    taken = _taken_bytes(namespace_path(config.shm.base_dir, config.shm.namespace))
    room = mount.free_bytes + taken
    one = max((line.epoch_bytes for line in bill.lines), default=0)
    needed = max(bill.epoch_bytes, one)
    has = f"{at} has {size(mount.free_bytes)} free of {size(mount.total_bytes)}, {size(taken)} are this driver's"
    if needed > room:
        what = "the configured streams, one epoch each," if bill.epoch_bytes >= one else "one epoch of a stream"
        return fail(CHECK, f"{has}; {what} need {size(needed)}", _enlarge(at, mount.total_bytes, needed - room))
    again = needed + one  # a producer that comes back gets a new epoch before the old one goes
    if again > room:
        found = f"{has}; {size(needed)} suffice until a producer restarts, which needs {size(one)} more"
        return warn(CHECK, found, _enlarge(at, mount.total_bytes, again - room))
    most = bill.total_bytes
    words = "without limit: policies.epoch_gc_enabled is false" if most is None else f"{size(most)} at the very most"
    return ok(CHECK, f"{has}; the configuration needs {size(needed)}, and takes {words}")


def check_aeron_space(aeron_dir: str) -> CheckResult:
    """Room for one more client, and for what sparse logs lack: who writes there on a full mount dies of SIGBUS."""
    mount = mount_space(aeron_dir)
    at = mount.mount_point
    if mount.free_bytes is None or mount.total_bytes is None:
        return ok(AERON_CHECK, f"{at}, where Aeron's files are, has no limit of its own")
    lacking = _lacking_bytes(aeron_dir)
    needed = AERON_BYTES + lacking
    has = f"{at}, where Aeron's files are, has {size(mount.free_bytes)} free of {size(mount.total_bytes)}"
    if needed <= mount.free_bytes:
        return ok(AERON_CHECK, f"{has}; its logs and one more client need {size(needed)}")
    found = f"{has}; one more client needs {size(AERON_BYTES)}, and sparse logs {size(lacking)} when they fill: "
    found += "a process that writes where there is no room is killed (SIGBUS)"
    return warn(AERON_CHECK, found, _enlarge(at, mount.total_bytes, needed - mount.free_bytes))


def shortage(config: DriverConfig) -> str | None:
    """One sentence where a driver that is to be started would not find room for one epoch beside Aeron's logs."""
    mount = mount_space(config.shm.base_dir)
    if mount.free_bytes is None or mount.total_bytes is None:
        return None
    epoch = max((line.epoch_bytes for line in config.bill().lines), default=0)
    needed = epoch + AERON_BYTES
    if needed <= mount.free_bytes:
        return None
    return (
        f"{mount.mount_point} has {size(mount.free_bytes)} free of {size(mount.total_bytes)}, and {size(needed)} are "
        f"needed: {size(epoch)} for the ring of a stream and {size(AERON_BYTES)} for Aeron's files; enlarge it: "
        + _enlarge(mount.mount_point, mount.total_bytes, needed - mount.free_bytes)
    )


def _enlarge(at: str, total_bytes: int, missing_bytes: int) -> str:
    enough = -(-(total_bytes + missing_bytes) // MIB)
    command = f"mount -o remount,size={enough}m {at}"
    if total_bytes <= DOCKER_DEFAULT_BYTES:
        return f"docker run --shm-size={enough}m …    (64 MiB is Docker's default; on a host: {command})"
    return f"{command}    (in a container: --shm-size={enough}m), or a profile with fewer slots or smaller strides"


def _taken_bytes(folder: str) -> int:
    return sum(found.st_blocks * BLOCK_BYTES for found in _files(folder))


def _lacking_bytes(folder: str) -> int:
    """What sparse files have yet to take."""
    return sum(max(found.st_size - found.st_blocks * BLOCK_BYTES, 0) for found in _files(folder))


def _files(folder: str) -> Iterator[os.stat_result]:
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(where, name))
