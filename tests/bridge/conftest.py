# SPDX-License-Identifier: Apache-2.0
"""A source host for senders that are turned by hand: its driver, a client of it, and the senders' own connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tensorpool as tp
from tensorpool import aeron
from tests.bridge.sending import POOL, Rig


@pytest.fixture(scope="module")
def pool() -> Iterator[tp.Local]:
    with tp.local(overrides=POOL) as pool:
        yield pool


@pytest.fixture(scope="module")
def client(pool: tp.Local) -> Iterator[tp.Client]:
    with pool.connect() as client:
        yield client


@pytest.fixture(scope="module")
def link(pool: tp.Local) -> Iterator[aeron.Client]:
    link = aeron.connect(pool.aeron_dir)
    yield link
    link.close()


@pytest.fixture
def make(pool: tp.Local, client: tp.Client, link: aeron.Client) -> Iterator[Callable[..., Rig]]:
    """Senders with these keys of the configuration; without a receiver yet."""
    rigs: list[Rig] = []

    def made(**keys: Any) -> Rig:
        rigs.append(Rig(pool, client, link, **keys))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()
