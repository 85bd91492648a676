# SPDX-License-Identifier: Apache-2.0
"""How many requests are looked at."""

from __future__ import annotations

import pytest

from tensorpool.discovery import rates as module
from tensorpool.discovery.rates import Bucket, Rates

S = 1_000_000_000


def test_a_bucket_holds_two_seconds_and_fills_evenly() -> None:
    """A clock that stands still, or goes back, fills nothing."""
    bucket = Bucket(5, 0)
    assert [bucket.take(0) for _ in range(11)] == [True] * 10 + [False]
    assert not bucket.take(S // 5 - 1)
    assert bucket.take(S // 5 + 1)
    assert not bucket.take(0)
    assert [bucket.take(100 * S) for _ in range(11)] == [True] * 10 + [False]


def test_a_client_over_its_limit_takes_nothing_from_the_others() -> None:
    """Its requests do not count for all together."""
    rates = Rates(client_per_s=2, total_per_s=5, now_ns=0)
    assert sum(rates.admits(1, 0) for _ in range(1000)) == 4
    assert sum(rates.admits(2, 0) for _ in range(1000)) == 4


def test_who_takes_a_new_id_each_time_is_held_by_the_limit_of_all() -> None:
    """And is not remembered for ever."""
    rates = Rates(client_per_s=2, total_per_s=5, now_ns=0)
    assert sum(rates.admits(client_id, 0) for client_id in range(1000)) == 10
    assert sum(rates.admits(client_id, S) for client_id in range(1000)) == 5


def test_only_so_many_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was silent longest is forgotten."""
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
    rates = Rates(client_per_s=1, total_per_s=100, now_ns=0)
    assert [rates.admits(client_id, 0) for client_id in (1, 1, 2, 1, 3, 1, 2)] == [
        True, True, True, False, True, False, True,
    ]  # fmt: skip
