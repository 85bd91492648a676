# SPDX-License-Identifier: Apache-2.0
"""A driver in a process of its own with its log in a file, for modules with a `deployment`; a bucket server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import bucket, s3_environment
from tests.support.chaos import start_logged
from tests.support.driver_process import Deployment, DriverProcess

__all__ = ["bucket", "log", "process", "s3_environment"]


@pytest.fixture
def log(shm_dir: Path) -> Path:
    return shm_dir / "log"


@pytest.fixture
def process(deployment: Deployment, log: Path) -> Iterator[DriverProcess]:
    with start_logged(deployment, log) as process:
        yield process
