# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: `--claims DRV-4.4-02` runs only the tests whose spec marker names this requirement.

With a mistake in the source a test may wait for what never comes; waits of that kind are cut short.
"""

from __future__ import annotations

import pytest

from tests.support.processes import wait_until

PATIENCE_S = 15.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", help="run only the tests that claim this requirement")


def pytest_configure() -> None:
    assert wait_until.__kwdefaults__ is not None
    wait_until.__kwdefaults__["timeout_s"] = PATIENCE_S


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--claims")
    if wanted is not None:
        claiming = [item for item in items if any(wanted in mark.args for mark in item.iter_markers("spec"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in claiming])
        items[:] = claiming
