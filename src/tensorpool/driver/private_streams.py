# SPDX-License-Identifier: Apache-2.0
"""Aeron stream ids that the driver lends to consumers that ask for streams of their own.

A consumer asks by a channel with id 0, for its descriptors, its progress or both; an explicit id is the producer's to
answer. Where one hello asks for both kinds, the producer answers first and the driver repeats that answer with the ids
that it adds, so that neither answer declines what the other one grants.

Ids are lent to consumers with a lease on the stream, so that they are as scarce as leases are. Holds no clock and does
no IO. Driver Model §11; Wire §5, §10.1.3; decisions E22-E25, E28, E43.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from tensorpool.channel import asks_for_id, is_repeatable, may_be_private
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.streams import IdPool
from tensorpool.soft_state import SoftStateTable
from tensorpool.wire.consumer_config import ConsumerTerms, requested_streams
from tensorpool.wire.control import ConsumerConfig, ConsumerHello

STALE_PERIODS: Final = 4  # a hello comes once in an announce period (E28)

type Owner = tuple[int, int]  # the stream, and the consumer's id


class PrivateStreams:
    """Who was lent which ids, and until when."""

    def __init__(self, config: DriverConfig, counts: Counter[str]) -> None:
        self._shared_channel = config.driver.descriptor.channel
        self._counts = counts
        self.descriptor_ids: Final = IdPool(config.driver.descriptor_stream_id_range)
        self.control_ids: Final = IdPool(config.driver.control_stream_id_range)
        self._borrowers = SoftStateTable[Owner, ConsumerTerms](STALE_PERIODS * config.announce_period_ns)
        self._half_answered: dict[Owner, tuple[ConsumerHello, int]] = {}  # the producer answers first; since when

    def __len__(self) -> int:
        return len(self._borrowers)

    @property
    def ids_lent(self) -> int:
        return len(self.descriptor_ids) + len(self.control_ids)

    def on_hello(self, hello: ConsumerHello, is_leased: bool, now_ns: int) -> ConsumerConfig | None:
        """The answer, where it is the driver's alone. `is_leased`: the consumer has a lease on the stream."""
        owner = hello.stream_id, hello.consumer_id
        if owner in self._borrowers:
            self._borrow(hello, now_ns)
        self._half_answered.pop(owner, None)
        descriptors, control = requested_streams(hello)
        if not (asks_for_id(descriptors) or asks_for_id(control)):
            return None
        if descriptors.stream_id or control.stream_id:
            if is_leased:
                self._half_answered[owner] = hello, now_ns
            return None
        answer = (self._borrowers.get(owner) or ConsumerTerms(hello)).answer()
        return self._with_ids(answer, hello, now_ns) if is_leased else answer

    def on_config(self, config: ConsumerConfig) -> ConsumerConfig | None:
        """Another process assigned a mode, a fallback or streams: our answers repeat the first two from now on.

        Returns that answer with ids of ours, where the consumer's hello asked both the producer and the driver.
        """
        owner = config.stream_id, config.consumer_id
        if owner not in self._borrowers and owner not in self._half_answered:
            return None
        texts = config.payload_fallback_uri, config.descriptor_channel, config.control_channel
        if not all(map(is_repeatable, texts)):
            self._counts["consumer_configs_refused"] += 1
            return None
        answer = None
        if owner in self._half_answered:
            hello, hello_ns = self._half_answered.pop(owner)
            completed = self._with_ids(config, hello, hello_ns)
            answer = completed if owner in self._borrowers else None
        borrower = self._borrowers.get(owner)
        if borrower is not None:
            borrower.override = config
        return answer

    def give_back(self, owner: Owner) -> None:
        """Its lease ended, or it is silent: others may have its ids."""
        self._borrowers.pop(owner)
        self._half_answered.pop(owner, None)
        self.descriptor_ids.give_back(owner)
        self.control_ids.give_back(owner)

    def on_stall(self, now_ns: int) -> None:
        """The driver did not run for a while, and could not receive hellos."""
        self._borrowers.refresh_all(now_ns)

    def forget_stale(self, now_ns: int) -> None:
        for owner, _ in self._borrowers.tick(now_ns).gone:
            self.give_back(owner)

    # --- inside

    def _borrow(self, hello: ConsumerHello, now_ns: int) -> None:
        owner = hello.stream_id, hello.consumer_id
        borrower = self._borrowers.get(owner) or ConsumerTerms()
        borrower.on_hello(hello)
        self._borrowers.add(owner, borrower, now_ns)

    def _with_ids(self, config: ConsumerConfig, hello: ConsumerHello, now_ns: int) -> ConsumerConfig:
        """The answer with an id for each channel that came with id 0, as far as there are some."""
        owner = hello.stream_id, hello.consumer_id
        for kind, ids, asked in zip(
            ("descriptor", "control"), (self.descriptor_ids, self.control_ids), requested_streams(hello), strict=True
        ):
            if not asks_for_id(asked):
                continue
            number = ids.lend(owner) if may_be_private(asked.channel, self._shared_channel) else None
            if number is not None:
                self._borrow(hello, now_ns)
            assigned = {f"{kind}_stream_id": number or 0, f"{kind}_channel": asked.channel if number else ""}
            config = msgspec.structs.replace(config, **assigned)
        return config
