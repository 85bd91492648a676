# SPDX-License-Identifier: Apache-2.0
"""Node ids: unique among live clients, given as wished for, rested before they are given again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorpool.driver.node_ids import NodeIds
from tensorpool.settings import Range

COOLDOWN_NS = 1_000


def test_ids_are_given_round_and_round_from_the_start() -> None:
    """Whoever comes first in a run gets another id than in the last one."""
    ids = NodeIds(Range(1, 4), 0, start=6)
    assert [ids.take(client, None, 0) for client in range(4)] == [3, 4, 1, 2]
    ids.give_back(1, 0)
    assert ids.take(9, 0, 0) == 4


def test_a_client_without_a_free_id_gets_none_until_one_has_rested() -> None:
    """It is not refused: it derives an id by itself."""
    ids = NodeIds(Range(1, 2), COOLDOWN_NS)
    assert (ids.take(1, None, 0), ids.take(2, None, 0), ids.take(3, None, 0)) == (1, 2, None)
    assert (ids.of(3), len(ids)) == (None, 2)
    ids.give_back(3, 0)
    ids.give_back(1, 5)
    assert ids.take(4, None, 5 + COOLDOWN_NS - 1) is None
    assert ids.take(5, None, 5 + COOLDOWN_NS) == 1


def test_a_range_without_ids_gives_none_but_wishes_are_granted() -> None:
    """Also outside of the range: the wish is the client's."""
    ids = NodeIds(Range(), COOLDOWN_NS)
    assert ids.take(1, None, 0) is None
    assert ids.take(2, 2**32 - 2, 0) == 2**32 - 2


def test_a_wish_that_cannot_be_granted_is_explained() -> None:
    """Who has it, or how long it rests; until then it is nobody's."""
    ids = NodeIds(Range(1, 9), 2_000_000)
    ids.take(41, 7, 0)
    assert ids.flaw_in_wish(7, 0) == "node id 7 belongs to client 41; ask for another, or for any"
    with pytest.raises(ValueError, match="cannot have 7"):
        ids.take(42, 7, 0)
    with pytest.raises(ValueError, match="client 41 has a node id"):
        ids.take(41, 8, 0)
    ids.give_back(41, 0)
    assert ids.flaw_in_wish(7, 1) == "node id 7 was given back and is free in 2 ms; ask for another, or for any"
    assert ids.flaw_in_wish(7, 2_000_000) is None
    assert ids.take(42, 7, 2_000_000) == 7


def test_another_range_leaves_what_is_held() -> None:
    """A reload gives others from then on."""
    ids = NodeIds(Range(1, 2), 0)
    ids.take(1, None, 0)
    ids.configure(Range(2, 3), 0)
    assert (ids.of(1), ids.take(2, None, 0), ids.take(3, None, 0), ids.take(4, None, 0)) == (1, 2, 3, None)


class Clients(RuleBasedStateMachine):
    """Clients come with and without wishes and go, while time passes, against a plain list of facts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = NodeIds(Range(1, 3), COOLDOWN_NS)
        self.now_ns = 0
        self.next_client = 1
        self.live: dict[int, int | None] = {}
        self.returned_ns: dict[int, int] = {}

    def is_free(self, node_id: int) -> bool:
        is_rested = self.now_ns - self.returned_ns.get(node_id, -COOLDOWN_NS) >= COOLDOWN_NS
        return is_rested and node_id not in self.live.values()

    @rule(wish=st.none() | st.integers(0, 6))
    def come(self, wish: int | None) -> None:
        client, self.next_client = self.next_client, self.next_client + 1
        if wish and not self.is_free(wish):
            assert self.ids.flaw_in_wish(wish, self.now_ns)
            return
        free = [node_id for node_id in (1, 2, 3) if self.is_free(node_id)]
        given = self.ids.take(client, wish, self.now_ns)
        assert given == wish if wish else given in free or (given is None and not free)
        self.live[client] = given

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.live)))
        node_id = self.live.pop(client)
        self.ids.give_back(client, self.now_ns)
        if node_id is not None:
            self.returned_ns[node_id] = self.now_ns

    @rule(step_ns=st.integers(1, 600))
    def wait(self, step_ns: int) -> None:
        self.now_ns += step_ns

    @invariant()
    def no_two_clients_share_an_id(self) -> None:
        held = [node_id for node_id in self.live.values() if node_id is not None]
        assert len(set(held)) == len(held) == len(self.ids)
        assert all(self.ids.of(client) == node_id for client, node_id in self.live.items())


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
