# SPDX-License-Identifier: Apache-2.0
"""A lake of pictures to export, and the programs that read what comes out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensorpool.lake import Gap
from tests.support.frame_rows import attribute, make_lake, row, source
from tests.support.programs import need

START = datetime(2026, 11, 16, 10, tzinfo=UTC)
STREAM = 10_000
SEQS = [*range(40), *range(44, 50)]


def picture(seq: int) -> npt.NDArray[np.uint8]:
    """24x32 in three channels; no two are alike, and no channel is like another."""
    return np.random.default_rng(seq).integers(0, 255, (24, 32, 3), np.uint8)


def rows(arrays: dict[int, npt.NDArray[Any]], epoch: int = 1) -> list[dict[str, Any]]:
    """20 frames a second."""
    return [
        row(array, seq=seq, epoch=epoch, time=START + timedelta(seconds=seq / 20), meta_version=1)
        for seq, array in arrays.items()
    ]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Frames 0 to 39 and 44 to 49 of camera/front, which is bgr24; four are missing."""
    attributes = [source(STREAM, "camera/front"), attribute(STREAM, 1, "pixel_format", "bgr24")]
    lost = Gap(STREAM, 1, 40, 44, "OVERWRITTEN")
    make_lake(tmp_path / "lake", rows({seq: picture(seq) for seq in SEQS}), gaps=(lost,), metadata=attributes)
    return tmp_path / "lake"


@pytest.fixture(scope="session")
def ffmpeg() -> None:
    need("ffmpeg")
