# SPDX-License-Identifier: Apache-2.0
"""Tables of several MiB, to consumers that look rarely beside one that looks all the time."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

import tensorpool as tp
from tensorpool import aeron
from tensorpool.aeron import MessageInfo
from tensorpool.client.metadata import MetadataCache
from tensorpool.wire import decode
from tests.client.conftest import Pair
from tests.support.processes import wait_until

SLEEP_S: Final = 0.2  # twice what Aeron grants to a consumer whose window is full
LATE_S: Final = 0.3  # this machine was busy: it slept longer than it meant to


class Sleeper:
    """Looks at the metadata stream as a client does, but rarely; `worst_s` is the longest time that it did not look."""

    def __init__(self, pool: tp.Local, stream_id: int) -> None:
        self.cache = MetadataCache()
        self._stream_id = stream_id
        self._connection = aeron.connect(pool.aeron_dir)
        self._subscription = aeron.subscribe(self._connection, pool.config.driver.metadata)
        self.worst_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> None:
        while self._subscription.poll(self._on_message, 100):
            pass
        self.worst_s = max(self.worst_s, time.monotonic() - self._looked_s)
        self._looked_s = time.monotonic()

    def sleep_and_look(self) -> bool:
        time.sleep(SLEEP_S)
        self.look()
        return True

    def close(self) -> None:
        self._connection.close()

    def _on_message(self, data: bytes, info: MessageInfo) -> None:
        message = decode(data)
        if getattr(message, "stream_id", None) == self._stream_id:
            self.cache.on_message(message, info.session_id)


def test_a_large_table_reaches_a_consumer_that_sleeps(pair: Pair, pool: tp.Local) -> None:
    """3 MiB, eight times what Aeron lets a consumer fall behind; again where the machine kept it from looking."""
    random = np.random.default_rng(1)
    sleeper = Sleeper(pool, pair.producer.stream_id)
    try:
        is_late = True
        while is_late and sleeper.cache.blob(1) is None:
            table = random.bytes(3 << 20)
            sleeper.look()
            sleeper.worst_s = 0.0
            pair.producer.publish_blob(table, blob_type=1)
            wait_until(lambda table=table: sleeper.sleep_and_look() and pair.consumer.blob(1) == table, "it is sent")
            is_late = sleeper.worst_s > LATE_S
        assert sleeper.cache.blob(1) == table
    finally:
        sleeper.close()
