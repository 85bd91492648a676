# SPDX-License-Identifier: Apache-2.0
"""The table of soft state: fresh, stale and gone, bounded, for every schedule of messages and ticks."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorpool.soft_state import SoftStateTable, Ticked

KEYS = st.integers(0, 5)


def test_an_entry_is_fresh_through_its_window_then_stale_then_gone() -> None:
    """To the nanosecond."""
    table = SoftStateTable[str, int](10, 30)
    table.add("a", 1, 0)
    assert (table.tick(9).stale, table.get_fresh("a", 9)) == ([], 1)
    assert table.get_fresh("a", 10) is None
    assert (table.tick(10).stale, table.get("a")) == ([("a", 1)], 1)
    assert table.tick(29).gone == []
    assert (table.tick(30).gone, table.get("a"), len(table)) == ([("a", 1)], None, 0)


def test_a_refresh_says_whether_the_entry_was_stale() -> None:
    """Once for each time that it comes back."""
    table = SoftStateTable[str, int](10, 30)
    table.add("a", 1, 0)
    table.tick(11)
    assert (table.refresh("a", 12), table.refresh("a", 13)) == (True, False)
    assert table.tick(22).stale == []


def test_a_full_table_refuses_new_entries_and_removes_stale_ones_at_the_next_tick() -> None:
    """An entry that is there can still be replaced and refreshed."""
    table = SoftStateTable[str, int](10, 1000, limit=2)
    assert [table.add(key, 1, 0) for key in ("a", "b", "c", "a")] == [True, True, False, True]
    table.refresh("b", 8)
    assert (table.tick(12).gone, list(table)) == ([("a", 1)], ["b"])


def test_an_entry_that_is_retired_is_stale_at_once_and_gone_later() -> None:
    """It is counted from then; its stale state is not reported by a tick."""
    table = SoftStateTable[str, int](10, 30)
    table.add("a", 1, 0)
    table.retire("a", 5)
    assert (table.get_fresh("a", 5), table.get("a"), table.tick(34)) == (None, 1, Ticked([], []))
    assert table.tick(35).gone == [("a", 1)]


def test_a_time_in_which_nothing_could_be_received_counts_against_no_entry() -> None:
    """After `refresh_all` every entry has its whole window before it."""
    table = SoftStateTable[str, int](10)
    table.add("a", 1, 0)
    table.add("b", 2, 5)
    table.refresh_all(100)
    assert table.tick(109).gone == []
    assert [key for key, _ in table.tick(110).gone] == ["a", "b"]


def test_the_oldest_entry_makes_room() -> None:
    """By its last refresh, not by when it was added."""
    table = SoftStateTable[str, int](10, limit=2)
    table.add("a", 1, 0)
    table.add("b", 2, 1)
    table.refresh("a", 2)
    assert table.pop_oldest() == ("b", 2)


class Schedule(RuleBasedStateMachine):
    """A table beside a plain model of it; time never goes back."""

    @initialize(stale=st.integers(0, 6), more=st.none() | st.integers(0, 6), limit=st.none() | st.integers(1, 4))
    def begin(self, stale: int, more: int | None, limit: int | None) -> None:
        self.now = 0
        self.stale_ns, self.gone_ns, self.limit = stale, None if more is None else stale + more, limit
        self.table = SoftStateTable[int, int](stale, self.gone_ns, limit=limit)
        self.model: dict[int, tuple[int, int, bool]] = {}  # value, last refresh, whether it is stale

    @rule(by=st.integers(0, 4))
    def wait(self, by: int) -> None:
        self.now += by

    @rule(key=KEYS, value=st.integers())
    def add(self, key: int, value: int) -> None:
        has_room = key in self.model or self.limit is None or len(self.model) < self.limit
        assert self.table.add(key, value, self.now) == has_room
        if has_room:
            self.model[key] = value, self.now, False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        value, _, is_stale = self.model[key]
        assert self.table.refresh(key, self.now) == is_stale
        self.model[key] = value, self.now, False

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        value = self.model.pop(key, None)
        assert self.table.pop(key) == (None if value is None else value[0])

    @rule()
    def tick(self) -> None:
        was_full = self.limit is not None and len(self.model) >= self.limit
        found = self.table.tick(self.now)
        stale, gone = {}, {}
        for key, (value, seen, was_stale) in tuple(self.model.items()):
            is_stale = was_stale or self.now - seen >= self.stale_ns
            if is_stale and not was_stale and self.gone_ns is not None:
                stale[key] = value
            if is_stale and (self.gone_ns is None or was_full or self.now - seen >= self.gone_ns):
                gone[key] = value
                del self.model[key]
            else:
                self.model[key] = value, seen, is_stale
        assert (dict(found.stale), dict(found.gone)) == (stale, gone)

    @invariant()
    def the_table_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "table"):
            return
        assert sorted(self.table) == sorted(self.model)
        assert len(self.table) == len(self.model)
        assert self.limit is None or len(self.table) <= self.limit
        for key, (value, seen, is_stale) in self.model.items():
            assert key in self.table
            assert self.table.get(key) == value
            is_fresh = not is_stale and self.now - seen < self.stale_ns
            assert self.table.get_fresh(key, self.now) == (value if is_fresh else None)


Schedule.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedule = Schedule.TestCase
