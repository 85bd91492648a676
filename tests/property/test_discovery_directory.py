# SPDX-License-Identifier: Apache-2.0
"""The directory against a list of what is fresh: whatever comes in whatever order, both find the same."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorpool.discovery.directory import Directory
from tests.discovery.conftest import EXPIRY_NS, announce, described, identity, named, read, request
from tests.levels import SOAK

DRIVERS = st.sampled_from(["a", "b"])
STREAMS = st.integers(1, 4)
EPOCHS = st.integers(1, 5)
NAMES = st.sampled_from(["", "Cam", "cam", "x"])
TAGS = st.sets(st.sampled_from(["p", "q", "P"]), max_size=2)
WINDOWS = {"a": EXPIRY_NS, "b": EXPIRY_NS // 2}


class Known:
    """A stream as a simple mind keeps it."""

    def __init__(self) -> None:
        self.epoch = 0  # 0: not announced
        self.producer_id = 0
        self.announced_ns = 0
        self.reported_ns = 0
        self.name, self.name_epoch = "", 0
        self.tags, self.meta_epoch = frozenset[str](), 0


class Directories(RuleBasedStateMachine):
    """Announces, metadata and time, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory([identity(name, window) for name, window in WINDOWS.items()], max_results=5)
        self.known: dict[tuple[str, int], Known] = {}
        self.now_ns = 0

    def of(self, driver: str, stream_id: int) -> Known:
        """What is known of it, without what has expired."""
        key = driver, stream_id
        known = self.known.get(key)
        if (
            known is not None
            and self.now_ns - (known.announced_ns if known.epoch else known.reported_ns) >= WINDOWS[driver]
        ):
            known = None
        if known is None:
            known = self.known[key] = Known()
            known.announced_ns = known.reported_ns = self.now_ns
        return known

    def fresh(self) -> dict[tuple[str, int], Known]:
        return {
            key: known
            for key, known in self.known.items()
            if known.epoch and self.now_ns - known.announced_ns < WINDOWS[key[0]]
        }

    @rule(ns=st.sampled_from([1, EXPIRY_NS // 4, EXPIRY_NS // 2, EXPIRY_NS]))
    def wait(self, ns: int) -> None:
        self.now_ns += ns

    @rule(driver=DRIVERS, stream_id=STREAMS, epoch=EPOCHS, producer_id=st.integers(0, 2))
    def hear(self, driver: str, stream_id: int, epoch: int, producer_id: int) -> None:
        known = self.of(driver, stream_id)
        taken = self.directory.on_pool_announce(
            driver, announce(stream_id, epoch=epoch, producer_id=producer_id), self.now_ns
        )
        assert taken is (epoch >= known.epoch)
        if not taken:
            return
        if epoch > known.epoch:
            if known.name_epoch < epoch:
                known.name = ""
            if known.meta_epoch < epoch:
                known.tags = frozenset()
        known.epoch, known.producer_id, known.announced_ns = epoch, producer_id, self.now_ns

    @rule(driver=DRIVERS, stream_id=STREAMS)
    def hear_again(self, driver: str, stream_id: int) -> None:
        is_known = (driver, stream_id) in self.fresh()
        assert self.directory.on_repeat(driver, stream_id, self.now_ns) is is_known
        if is_known:
            self.known[driver, stream_id].announced_ns = self.now_ns

    @rule(driver=DRIVERS, stream_id=STREAMS, epoch=EPOCHS, name=NAMES)
    def name(self, driver: str, stream_id: int, epoch: int, name: str) -> None:
        known = self.of(driver, stream_id)
        known.reported_ns = self.now_ns
        taken = self.directory.on_data_source_announce(driver, named(stream_id, name, epoch), self.now_ns)
        assert taken is (epoch >= known.epoch)
        if taken:
            known.name, known.name_epoch = name or known.name, epoch

    @rule(driver=DRIVERS, stream_id=STREAMS, tags=TAGS)
    def describe(self, driver: str, stream_id: int, tags: set[str]) -> None:
        known = self.of(driver, stream_id)
        known.reported_ns = self.now_ns
        assert self.directory.on_data_source_meta(driver, described(stream_id, tags=",".join(tags)), self.now_ns)
        known.tags, known.meta_epoch = frozenset(tags), max(known.name_epoch, known.epoch)

    @rule(
        stream_id=st.none() | STREAMS,
        producer_id=st.none() | st.integers(0, 2),
        name=NAMES,
        tags=st.lists(st.sampled_from(["p", "q", "P"]), max_size=3),
    )
    def ask(self, stream_id: int | None, producer_id: int | None, name: str, tags: list[str]) -> None:
        wanted = [
            (key, known.epoch)
            for key, known in sorted(self.fresh().items())
            if stream_id in (None, key[1])
            and producer_id in (None, known.producer_id)
            and name in ("", known.name)
            and set(tags) <= known.tags
        ]
        filters: dict[str, Any] = {"stream_id": stream_id, "producer_id": producer_id, "data_source_name": name}
        asked = request(*tags, **filters)
        results = self.directory.find(asked, self.now_ns)
        assert [((each.driver_instance_id, each.stream_id), each.epoch) for each in results] == wanted
        for each in results:
            known = self.known[each.driver_instance_id, each.stream_id]
            assert {tag.tag for tag in each.tags} == known.tags  # all of them, not only those that were asked for
            assert each.data_source_name == known.name
        response = read(self.directory.answer(asked, self.now_ns, 1 << 19))
        assert len(response.results) == (len(wanted) if len(wanted) <= 5 else 0)

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        self.directory.expire(self.now_ns)
        assert len(self.directory) == len(self.fresh())
        held = {entry for holders in self.directory._index.values() for entry in holders}
        assert len(held) == len(self.directory)


TestDirectories = Directories.TestCase
TestDirectories.settings = settings(max_examples=150 * SOAK, stateful_step_count=40)
