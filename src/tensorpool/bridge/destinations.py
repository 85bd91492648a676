# SPDX-License-Identifier: Apache-2.0
"""Which local streams a bridge produces: those of its mappings, and for mappings without one an id of its range.

A destination that was configured is asked for until it is free. An id that was chosen is left for the next one of the
range when another client holds it for longer than a dead producer's lease lasts. Bridge §4; decisions G4, G9, G29.
"""

from __future__ import annotations

import threading
from typing import Final

from tensorpool.bridge.config import BridgeConfig, MappingConfig
from tensorpool.bridge.config_checks import allocatable
from tensorpool.client import Client, Producer
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import AttachRefused, TensorPoolError

ATTACH_TIMEOUT_S: Final = 2.0


class Destinations:
    """The ids that are chosen so far; they stay chosen for as long as the bridge lives. For any thread."""

    def __init__(self, config: BridgeConfig, driver: DriverConfig) -> None:
        self._ids = allocatable(config, driver)
        self._outlast_s = driver.lease_duration_ns / 1e9 + ATTACH_TIMEOUT_S
        self._chosen: dict[MappingConfig, int] = {}
        self._lock = threading.Lock()

    def chosen(self, mapping: MappingConfig) -> int:
        """What was chosen for a mapping; 0: nothing yet."""
        return self._chosen.get(mapping, 0)

    def attach(self, mapping: MappingConfig, client: Client) -> Producer:
        """Become the exclusive producer of the mapping's destination. Waits; raises TensorPoolError."""
        if mapping.dest_stream_id:
            return client.producer(mapping.dest_stream_id, create=True, timeout=ATTACH_TIMEOUT_S, is_relay=True)
        refusal: TensorPoolError | None = None
        tried: set[int] = set()
        while (stream_id := self._choose(mapping, tried)) is not None:
            tried.add(stream_id)
            try:
                return client.producer(stream_id, create=True, timeout=self._outlast_s, is_relay=True)
            except AttachRefused as error:
                refusal = error
        raise refusal or TensorPoolError(f"every id of bridge.dest_stream_id_range = {self._ids} is in use here")

    def _choose(self, mapping: MappingConfig, tried: set[int]) -> int | None:
        """The one that the mapping has, else the first that is neither tried nor another mapping's."""
        with self._lock:
            mine = self._chosen.get(mapping)
            if mine is not None and mine not in tried:
                return mine
            taken = tried | {chosen for other, chosen in self._chosen.items() if other is not mapping}
            found = next((stream_id for stream_id in self._ids if stream_id not in taken), None)
            if found is not None:
                self._chosen[mapping] = found
            return found
