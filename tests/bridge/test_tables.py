# SPDX-License-Identifier: Apache-2.0
"""Tables that a bridge keeps for whoever comes later: whole ones only, and never more than the limit. Without IO."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.bridge.tables import MESSAGE_BYTES, MESSAGES_PER_FLUSH, TableMessage, Tables
from tensorpool.client.metadata import blob_messages
from tensorpool.wire.control import MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete

STREAM = 7
LIMIT = 1 << 20


def table(data: bytes, version: int = 1, blob_type: int = 3) -> list[TableMessage]:
    messages = list(blob_messages(STREAM, version, blob_type, data))
    assert all(isinstance(it, MetaBlobAnnounce | MetaBlobChunk | MetaBlobComplete) for it in messages)
    return messages  # type: ignore[return-value]


def take(tables: Tables[TableMessage], messages: Iterable[TableMessage]) -> list[str]:
    """Why tables were dropped."""
    return [reason for reason in (tables.take(message, message) for message in messages) if reason]


def flushed(tables: Tables[TableMessage], room: int = 1 << 30) -> list[TableMessage]:
    """What is due, as far as there is room for so many messages."""
    sent: list[TableMessage] = []

    def offer(message: TableMessage) -> bool:
        if len(sent) == room:
            return False
        sent.append(message)
        return True

    while tables.flush(offer):
        pass
    return sent


def test_a_table_is_due_once_it_is_complete_and_again_for_who_comes_later() -> None:
    tables = Tables[TableMessage](LIMIT)
    messages = table(bytes(200_000))
    assert take(tables, messages[:-1]) == []
    assert flushed(tables) == []
    assert take(tables, messages[-1:]) == []
    assert flushed(tables) == messages
    assert take(tables, messages) == []  # the source repeats it
    assert flushed(tables) == []
    tables.post()
    assert flushed(tables) == messages


def test_who_comes_in_the_middle_of_a_table_gets_it_from_its_beginning() -> None:
    """Chunks without their announce would be of no use."""
    tables = Tables[TableMessage](LIMIT)
    messages = table(bytes(300_000))
    take(tables, messages)
    assert flushed(tables, room=3) == messages[:3]
    tables.post()
    assert flushed(tables) == messages


def test_tables_of_several_types_and_versions_are_kept_beside_each_other() -> None:
    tables = Tables[TableMessage](LIMIT)
    all_of_them = [table(bytes([n]) * 1000, version, n) for n, version in ((1, 1), (2, 1), (1, 2))]
    for messages in all_of_them:
        assert take(tables, messages) == []
    assert flushed(tables) == [message for messages in all_of_them for message in messages]
    changed = table(b"another", 1, 2)
    take(tables, changed)
    assert flushed(tables) == changed
    tables.post()
    assert flushed(tables) == [*all_of_them[0], *all_of_them[2], *changed]


@pytest.mark.parametrize("left_out", [1, 2, -2])
def test_a_table_with_a_gap_is_dropped(left_out: int) -> None:
    tables = Tables[TableMessage](LIMIT)
    messages = table(bytes(200_000))
    del messages[left_out]
    assert take(tables, messages) == ["table_incomplete"]
    assert flushed(tables) == []
    assert tables.size_bytes == 0


def test_a_table_with_two_checksums_or_begun_anew_is_dropped() -> None:
    tables = Tables[TableMessage](LIMIT)
    *begun, _ = table(b"data")
    other = MetaBlobComplete(stream_id=STREAM, meta_version=1, checksum=1)
    assert take(tables, [*begun, other]) == ["table_incomplete"]
    whole = table(b"data")
    assert take(tables, [*begun, *whole]) == ["table_incomplete"]
    assert flushed(tables) == whole


def test_a_flush_ends_after_some_messages() -> None:
    """The rest has its turn later: frames are sent meanwhile."""
    tables = Tables[TableMessage](LIMIT * 4)
    messages = table(bytes(65_536 * 2 * MESSAGES_PER_FLUSH))
    take(tables, messages)
    assert tables.flush(lambda message: True) == MESSAGES_PER_FLUSH
    assert tables.flush(lambda message: False) == 0
    assert len(flushed(tables)) == len(messages) - MESSAGES_PER_FLUSH


def test_the_oldest_table_makes_room() -> None:
    tables = Tables[TableMessage](LIMIT)
    first, second = (table(bytes([n]) * 600_000, blob_type=n) for n in (1, 2))
    assert take(tables, first) == []
    assert take(tables, second) == ["table_forgotten"]
    tables.post()
    assert flushed(tables) == second


def test_a_table_that_is_too_large_takes_no_memory() -> None:
    """By what its announce says, and by the number of its messages."""
    tables = Tables[TableMessage](LIMIT)
    assert take(tables, table(bytes(LIMIT + 1))) == ["table_too_large"]
    crumbs: list[TableMessage] = [
        MetaBlobChunk(stream_id=STREAM, meta_version=1, chunk_offset=n, chunk_bytes=b"x")
        for n in range(LIMIT // MESSAGE_BYTES)
    ]
    announce = MetaBlobAnnounce(stream_id=STREAM, meta_version=1, blob_type=1, total_len=LIMIT, checksum=0)
    assert take(tables, [announce, *crumbs]) == ["table_too_large"]
    assert tables.size_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 400), st.integers(-1, 6)), max_size=60))
def test_memory_stays_within_the_limit_and_what_is_sent_is_whole(said: list[tuple[int, int, int, int]]) -> None:
    """Whatever messages come in whatever order."""
    tables = Tables[TableMessage](4_000)
    for version, blob_type, length, left_out in said:
        messages = table(bytes([blob_type]) * length, version, blob_type)
        if 0 <= left_out < len(messages):
            del messages[left_out]
        take(tables, messages)
        assert 0 <= tables.size_bytes <= 4_000
        kept = [*tables._kept.values(), *tables._partial.values()]
        assert tables.size_bytes == sum(it.size_bytes for it in kept)
    sent = flushed(tables)
    whole = [message for message in sent if isinstance(message, MetaBlobAnnounce)]
    assert len(whole) == sum(isinstance(message, MetaBlobComplete) for message in sent)
    tables.clear()
    assert tables.size_bytes == 0
    assert flushed(tables) == []
