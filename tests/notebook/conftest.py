# SPDX-License-Identifier: Apache-2.0
"""A driver, and kernels of notebooks that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorpool as tp

PROFILE = {"header_nslots": 16, "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 18}]}


@pytest.fixture(scope="package")
def pool() -> Iterator[tp.Local]:
    """One driver for all; use stream names of your own."""
    with tp.local(overrides={"profiles.default": PROFILE, "policies.announce_period_ms": 200}) as pool:
        yield pool


@pytest.fixture(scope="package")
def client(pool: tp.Local) -> Iterator[tp.Client]:
    with pool.connect() as client:
        yield client


@pytest.fixture(scope="package")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Jupyter and IPython keep their files."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(folder / name.lower()))
        yield folder
