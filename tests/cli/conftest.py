# SPDX-License-Identifier: Apache-2.0
"""A driver for the commands under test, and the commands as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import msgspec
import pytest
from click.testing import CliRunner

import tensorpool as tp
from tensorpool.cli.main import group
from tests.support.processes import ROOT, Process

# Several sizes of frames, small enough for many streams.
PROFILE = {
    "header_nslots": 64,
    "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 12}, {"pool_id": 2, "stride_bytes": 1 << 18}],
}


class Result(msgspec.Struct, frozen=True):
    """How a command ended, and what it said."""

    code: int
    stdout: str
    stderr: str


class Shell:
    """Runs `tensorpool …` where a driver is running."""

    def __init__(self, pool: tp.Local) -> None:
        self.pool = pool
        self.environment: Mapping[str, str] = {
            "AERON_DIR": pool.aeron_dir,
            "SHM_BASE_DIR": pool.config.shm.base_dir,
        }

    def run(self, *arguments: str) -> Result:
        """To its end."""
        done = subprocess.run(
            [sys.executable, "-m", "tensorpool", *arguments],
            capture_output=True,
            text=True,
            timeout=180,
            env=os.environ | {"PYTHONPATH": str(ROOT), **self.environment},
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def run_here(self, *arguments: str) -> tuple[int, str]:
        """In this process, which saves the second that an interpreter takes to start: exit code and output."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            result = CliRunner(env=self.environment).invoke(group, list(arguments))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if isinstance(result.exception, tp.TensorPoolError):
            return 1, f"{result.output}error: {result.exception}\n"  # as `main` says it
        return result.exit_code, result.output

    def start(self, *arguments: str) -> Process:
        """In the background; stdout and stderr together."""
        return Process("-m", "tensorpool", *arguments, **self.environment)


@pytest.fixture(scope="package")
def shell() -> Iterator[Shell]:
    """One driver for all; use stream names of your own."""
    with tp.local(overrides={"profiles.default": PROFILE, "policies.announce_period_ms": 1000}) as pool:
        yield Shell(pool)


@pytest.fixture(scope="package")
def client(shell: Shell) -> Iterator[tp.Client]:
    """A client in this process."""
    with shell.pool.connect() as client:
        yield client
