# SPDX-License-Identifier: Apache-2.0
"""A driver for the sources under test, and the programs that they start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tensorpool as tp
from tests.support.programs import need


@pytest.fixture(scope="package")
def pool() -> Iterator[tp.Local]:
    """One driver for all; use stream names of your own."""
    profile = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 17}]}
    with tp.local(overrides={"profiles.default": profile}) as pool:
        yield pool


@pytest.fixture
def client(pool: tp.Local) -> Iterator[tp.Client]:
    with pool.connect() as client:
        yield client


@pytest.fixture(scope="session")
def ffmpeg() -> None:
    need("ffmpeg")


@pytest.fixture(scope="session")
def gstreamer() -> None:
    need("gstreamer")
