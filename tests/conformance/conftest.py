# SPDX-License-Identifier: Apache-2.0
"""For modules with a `deployment` of their own: a client of it that starts with an empty transcript."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.driver_client import DriverClient
from tests.support.driver_process import Deployment


@pytest.fixture
def client(deployment: Deployment) -> Iterator[DriverClient]:
    with DriverClient(deployment) as client:
        yield client.forget()
