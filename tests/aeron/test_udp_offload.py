# SPDX-License-Identifier: Apache-2.0
"""The UDP offload of the media driver: what it merges and splits, between which peers, and when it steps aside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorpool import _core

MOST_BYTES = 65_535 - 48
SIZES = st.integers(0, 65_507) | st.sampled_from([1, 32, 1408, 8192])


@given(
    st.lists(SIZES, max_size=64)
    | st.builds(lambda size, count, last: [size] * count + [last], SIZES, st.integers(0, 16), SIZES)
)
def test_every_send_of_a_batch_splits_into_the_datagrams_that_were_merged(lengths: list[int]) -> None:
    """No datagram is lost, repeated, cut or joined, whatever the sizes, and no send exceeds what UDP carries."""
    seen: list[int] = []
    for first, count in _core.udp_groups(lengths):
        assert first == len(seen)
        sent = lengths[first : first + count]
        if count == 1:
            seen += sent
            continue
        assert sum(sent) <= MOST_BYTES
        datagrams = _core.udp_split(sum(sent), sent[0])
        assert [offset for offset, _ in datagrams] == [sum(sent[:index]) for index in range(count)]
        seen += [length for _, length in datagrams]
    assert seen == lengths


@given(st.integers(0, 65_535), st.integers(0, 70_000))
def test_datagrams_of_a_buffer_cover_it_once(length: int, segment_bytes: int) -> None:
    """Whatever size the kernel reports: nothing outside of the buffer, nothing twice."""
    at = 0
    for offset, size in _core.udp_split(length, segment_bytes):
        assert offset == at
        at += size
    assert at == length
