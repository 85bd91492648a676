# SPDX-License-Identifier: Apache-2.0
"""One browser for the tests of a module. Each test has its own page, about which the browser must not complain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.console_page.site import Site, Watched, chromium, running, watched


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running() as site:
        yield site


@pytest.fixture
def seen(browser: Browser) -> Iterator[Watched]:
    with watched(browser) as seen:
        yield seen
