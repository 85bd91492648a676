# SPDX-License-Identifier: Apache-2.0
"""A driver in a process of its own, started as an operator starts it.

The only file of the driver's conformance tests that knows which driver they judge: its command line, the keys of its
configuration (Driver Model §17) and how its operator revokes a lease. What it says and does is observed from outside,
over Aeron (`driver_client`) and in the files that it makes.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.processes import Process, wait_until
from tests.support.toml import toml_text

IPC: Final = "aeron:ipc?term-length=4m"
NSLOTS: Final = 8
POOLS: Final = {1: 256, 7: 4096}  # id: stride
PROFILE: Final = {
    "header_nslots": NSLOTS,
    "payload_pools": [{"pool_id": id, "stride_bytes": stride} for id, stride in POOLS.items()],
}

_control_stream_ids = itertools.count(40_000, 10)  # many drivers share a media driver

_OPERATED = """
import sys
from tensorpool.driver import Driver, DriverConfig

with Driver(DriverConfig.load(sys.argv[1]), aeron_dir=sys.argv[2]) as driver:
    for line in sys.stdin:
        driver.conductor.revoke(int(line))
"""


class Deployment:
    """One configuration, run by one driver process after the other.

    `streams` are ids; further arguments are tables whose keys go over the defaults. A control stream id of None leaves
    the key out.
    """

    def __init__(
        self,
        folder: Path,
        aeron_dir: str,
        *,
        streams: Sequence[int] = (10_000,),
        driver: Mapping[str, Any] | None = None,
        shm: Mapping[str, Any] | None = None,
        policies: Mapping[str, Any] | None = None,
        profiles: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.aeron_dir = aeron_dir
        self.tables: dict[str, dict[str, Any]] = {
            "driver": {"control_stream_id": next(_control_stream_ids), **(driver or {})},
            "shm": {"base_dir": str(folder / "shm"), "namespace": "lab", **(shm or {})},
            "policies": {
                "announce_period_ms": 100,
                "lease_keepalive_interval_ms": 200,
                "shutdown_timeout_ms": 100,
                **(policies or {}),
            },
            "profiles": {"small": PROFILE, **(profiles or {})},
            "streams": {f"s{id}": {"stream_id": id, "profile": "small"} for id in streams},
        }

    @property
    def control(self) -> tuple[str, int]:
        driver = self.tables["driver"]
        return driver.get("control_channel", IPC), driver.get("control_stream_id") or 1000

    @property
    def announce(self) -> tuple[str, int]:
        channel, stream_id = self.control
        return channel, self.tables["driver"].get("announce_stream_id", stream_id)

    @property
    def keepalive_interval_ns(self) -> int:
        return int(self.tables["policies"]["lease_keepalive_interval_ms"]) * 1_000_000

    @property
    def lease_ns(self) -> int:
        """From the last keepalive to expiry."""
        return self.keepalive_interval_ns * int(self.tables["policies"].get("lease_expiry_grace_intervals", 3))

    @property
    def base_dir(self) -> Path:
        return Path(self.tables["shm"]["base_dir"])

    @property
    def config_path(self) -> Path:
        return self.folder / "driver.toml"

    def start(self, **environment: str) -> DriverProcess:
        """`tensorpool driver` with this configuration. Returns at once; `DriverClient.meet` waits."""
        self._write()
        arguments = ["driver", "--config", str(self.config_path), "--aeron-dir", self.aeron_dir]
        return DriverProcess("-m", "tensorpool", *arguments, "--log-level", "error", **environment)

    def start_limited(self, prelude: str) -> DriverProcess:
        """The same, after `prelude` has taken something away from the process."""
        self._write()
        arguments = ["driver", "--config", str(self.config_path), "--aeron-dir", self.aeron_dir]
        script = f"import os, sys\n{prelude}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        return DriverProcess("-c", script, "-m", "tensorpool", *arguments, "--log-level", "error")

    def start_operated(self) -> DriverProcess:
        """A driver whose operator can revoke leases."""
        self._write()
        return DriverProcess("-c", _OPERATED, str(self.config_path), self.aeron_dir)

    def epochs(self, stream_id: int) -> list[int]:
        """The epochs of a stream that have a directory, in order; one on its way out has none."""
        names = [path.name for path in self.base_dir.glob(f"*/*/{stream_id}/*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def leftovers(self) -> list[Path]:
        """What lies below the namespace's directory, or beside it; the record of its highest epoch stays on purpose."""
        own = {path for depth in ("*", "*/*") for path in self.base_dir.glob(depth) if path.is_dir()}
        own.update(self.base_dir.glob("*/*/highest-epoch.*"))
        return sorted(path for path in self.base_dir.rglob("*") if path not in own)

    def _write(self) -> None:
        self.config_path.write_text(toml_text(self.tables), encoding="utf-8")


class DriverProcess(Process):
    """A driver's process."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        super().__init__(*arguments, **_compiled(), **environment)

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self.send(signal.SIGKILL)
        self.finish()

    def terminate(self) -> tuple[int, str]:
        """SIGTERM, as a service manager stops it: exit code and output."""
        self.send(signal.SIGTERM)
        return self.finish()

    def revoke(self, lease_id: int) -> None:
        """As the operator of `start_operated`."""
        self.write_line(str(lease_id))

    def wait_for_end(self) -> tuple[int, str]:
        wait_until(lambda: self.has_ended, "the driver ends")
        return self.finish()


def path_of(uri: str) -> Path:
    """The file that a region URI names."""
    scheme, _, path = uri.partition("?path=")
    assert scheme == "shm:file", uri
    return Path(path)


@functools.cache
def _compiled() -> dict[str, str]:
    """Where Python keeps no bytecode, a place for it all the same: a process starts in half the time."""
    if not sys.dont_write_bytecode or "PYTHONPYCACHEPREFIX" in os.environ:
        return {}
    folder = tempfile.mkdtemp(prefix="tp-test-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
