# SPDX-License-Identifier: Apache-2.0
"""What the system allows this user: locked memory, open files, socket buffers."""

from __future__ import annotations

import resource
from typing import Final

from tensorpool.diagnosis.check_result import CheckResult, ok, size, warn
from tensorpool.driver.config import DriverConfig
from tensorpool.shm.locking import lockable_bytes

MIN_FILES: Final = 1024
MIN_SOCKET_BYTES: Final = 2 << 20  # a burst of one large frame in datagrams


def check_memlock(config: DriverConfig) -> CheckResult | None:
    """Only where policies.mlock_shm asks for it."""
    if not config.policies.mlock_shm:
        return None
    allowed = lockable_bytes()
    needed = config.locked_bytes
    if allowed is None:
        return ok("memlock", f"no limit; policies.mlock_shm locks {size(needed)}")
    if allowed < needed:
        found = f"`ulimit -l` is {size(allowed)}, policies.mlock_shm has to lock {size(needed)}"
        return warn("memlock", found, f"ulimit -l {-(-needed // 1024)}    (a service: LimitMEMLOCK=infinity)")
    return ok("memlock", f"`ulimit -l` is {size(allowed)}, {size(needed)} are to be locked")


def check_open_files() -> CheckResult:
    """Every log of a publication and every region is a file for a moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        return warn("open files", f"`ulimit -n` is {soft} (at most {hard})", f"ulimit -n {min(max(hard, 0), 65536)}")
    return ok("open files", f"`ulimit -n` is {soft}")


def check_socket_buffers(proc: str = "/proc/sys/net/core") -> CheckResult:
    """Only bridges and registries use sockets; a small buffer loses datagrams of a burst."""
    found = {}
    for name in ("rmem_max", "wmem_max"):
        try:
            with open(f"{proc}/{name}", encoding="utf-8") as file:
                found[name] = int(file.read())
        except (OSError, ValueError):
            return ok("socket buffers", f"net.core.{name} cannot be read here; only a bridge would need it")
    shown = ", ".join(f"net.core.{name} = {value}" for name, value in found.items())
    small = [name for name, value in found.items() if value < MIN_SOCKET_BYTES]
    if small:
        wanted = " ".join(f"net.core.{name}={2 * MIN_SOCKET_BYTES}" for name in small)
        return warn(
            "socket buffers", f"{shown}: a bridge may lose bursts", f"sysctl -w {wanted}    (only for a bridge)"
        )
    return ok("socket buffers", shown)
