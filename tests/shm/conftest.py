# SPDX-License-Identifier: Apache-2.0
"""The private directory as the one allowed base; nothing in it stays mapped or open after a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool.shm import AllowedBases
from tests.shm.by_hand import mapped_files, open_files


@pytest.fixture
def bases(shm_dir: Path) -> AllowedBases:
    return AllowedBases([shm_dir])


@pytest.fixture(autouse=True)
def _nothing_left_behind(shm_dir: Path) -> Iterator[None]:
    """Whatever a test did, once its objects are gone it has no region mapped and no descriptor open."""
    yield
    if mapped_files(shm_dir):
        gc.collect()  # a failed test's traceback is a cycle
    assert mapped_files(shm_dir) == []
    assert open_files(shm_dir) == []
