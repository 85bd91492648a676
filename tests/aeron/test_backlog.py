# SPDX-License-Identifier: Apache-2.0
"""Which messages lay in a log before its subscriber came."""

from __future__ import annotations

from typing import cast

import msgspec

from tensorpool import aeron
from tensorpool.aeron.backlog import AT_LEAST_NS, AT_MOST_NS, Backlog


class Info(msgspec.Struct):
    session_id: int
    position: int = 0


class Shared(msgspec.Struct):
    session_id: int
    position: int


def backlog_at(now_ns: int, shared: Shared | None = None) -> Backlog:
    return Backlog(now_ns, cast(aeron.Publication | None, shared))


def has(backlog: Backlog, session_id: int, position: int = 0) -> bool:
    return backlog.contains(cast(aeron.MessageInfo, Info(session_id, position)))


def test_of_the_shared_log_the_position_decides() -> None:
    """Whenever a message of it is read."""
    backlog = backlog_at(0, Shared(7, 640))
    assert has(backlog, 7, 640)
    assert not has(backlog, 7, 641)
    backlog.on_polled(0, AT_MOST_NS + 1)
    assert has(backlog, 7, 640)


def test_other_logs_belong_to_it_until_a_poll_finds_nothing() -> None:
    """But not in the first moment, in which logs may not be in sight yet."""
    backlog = backlog_at(1_000)
    backlog.on_polled(0, 1_000 + AT_LEAST_NS)
    assert has(backlog, 8)
    backlog.on_polled(3, 1_001 + AT_LEAST_NS)
    assert has(backlog, 8)
    backlog.on_polled(0, 1_001 + AT_LEAST_NS)
    assert not has(backlog, 8)


def test_a_log_that_never_ends_ends_it_after_a_second() -> None:
    """And nothing begins it again."""
    backlog = backlog_at(1_000)
    backlog.on_polled(256, 1_000 + AT_MOST_NS)
    assert has(backlog, 8)
    backlog.on_polled(256, 1_001 + AT_MOST_NS)
    assert not has(backlog, 8)
    backlog.on_polled(256, 1_000)
    assert not has(backlog, 8)
