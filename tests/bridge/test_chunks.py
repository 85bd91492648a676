# SPDX-License-Identifier: Apache-2.0
"""How payloads are cut: every byte exactly once, chunk 0 beside its header, nothing larger than a datagram."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorpool._core import ChunkPlan
from tensorpool.bridge.config import (
    AERON_HEADER_BYTES,
    CHUNK_OVERHEAD_BYTES,
    HEADER_BYTES,
    MAX_CHUNKS,
    MAX_PAYLOAD_BYTES,
    BridgeConfig,
    BridgeSection,
)

ALL_SLICES = 3000  # up to so many chunks every one is looked at

mtus = st.integers(346, 65_504)
chunk_sizes = st.none() | st.integers(1, 65_535)


def section(mtu_bytes: int, chunk_bytes: int | None = None, max_chunk_bytes: int = 65_535) -> BridgeSection:
    keys = {
        "instance_id": "test",
        "role": "sender",
        "payload_channel": "aeron:udp?endpoint=127.0.0.1:40456",
        "payload_stream_id": 50_000,
        "control_channel": "aeron:udp?endpoint=127.0.0.1:40456",
        "control_stream_id": 50_001,
        "mtu_bytes": mtu_bytes,
        "max_chunk_bytes": max_chunk_bytes,
    } | ({} if chunk_bytes is None else {"chunk_bytes": chunk_bytes})
    return BridgeConfig.load(environ={}, bridge=keys, mappings=[{"source_stream_id": 1, "dest_stream_id": 2}]).bridge


def plan_of(sizes: BridgeSection) -> ChunkPlan:
    return ChunkPlan(sizes.first_chunk_bytes, sizes.effective_chunk_bytes)


@pytest.mark.spec("BRG-5.2-01", "BRG-5.2-02", "BRG-5.2-10", "BRG-5.2-11")
@given(mtu=mtus, chunk=chunk_sizes, share=st.floats(0, 1), few=st.integers(0, 5000))
@example(mtu=1408, chunk=None, share=0.0, few=0)
@example(mtu=1408, chunk=None, share=0.0, few=1063)
@example(mtu=1408, chunk=None, share=0.0, few=1064)
@example(mtu=346, chunk=None, share=0.0, few=2)
@example(mtu=1408, chunk=None, share=1.0, few=0)
@example(mtu=65_504, chunk=None, share=1.0, few=0)
def test_every_byte_of_a_payload_is_in_exactly_one_chunk(mtu: int, chunk: int | None, share: float, few: int) -> None:
    """For every MTU, chunk size and payload: the slices are in order, without gap or overlap, and never empty."""
    plan = plan_of(section(mtu, chunk))
    payload = min(few if share == 0 else int(share * plan.largest_bytes), plan.largest_bytes)
    count = plan.count(payload)
    assert 1 <= count <= MAX_CHUNKS
    looked_at = range(count) if count <= ALL_SLICES else [*range(50), count // 2, *range(count - 50, count)]
    for index in looked_at:
        offset, length = plan.slice(index, payload)
        expected = 0 if index == 0 else sum(plan.slice(index - 1, payload))
        assert offset == expected
        assert length > 0 or payload == 0
    assert sum(plan.slice(count - 1, payload)) == payload


@pytest.mark.spec("BRG-5.2-15", "BRG-5.2-16", "BRG-10-08")
@given(mtu=mtus, chunk=chunk_sizes, largest=st.integers(1, 65_535))
def test_chunks_fit_a_datagram_and_the_configured_limits(mtu: int, chunk: int | None, largest: int) -> None:
    """Chunk 0 with its 256 header bytes (G1) and every later chunk are one Aeron fragment of the MTU."""
    sizes = section(mtu, chunk, largest)
    first, later = sizes.first_chunk_bytes, sizes.effective_chunk_bytes
    assert 1 <= first <= later <= min(largest, chunk or 65_535)
    assert AERON_HEADER_BYTES + CHUNK_OVERHEAD_BYTES + HEADER_BYTES + first <= mtu
    assert AERON_HEADER_BYTES + CHUNK_OVERHEAD_BYTES + later <= mtu
    assert later == min(chunk or mtu - 128, mtu - 128, largest)


@pytest.mark.spec("BRG-5.2-17")
def test_default_sizes() -> None:
    """MTU 1408 gives chunks of 1280 bytes, and 1063 beside the header (G1)."""
    sizes = section(1408)
    assert (sizes.effective_chunk_bytes, sizes.first_chunk_bytes) == (1280, 1063)


@pytest.mark.spec("BRG-5.2-02", "BRG-11-03")
@given(mtu=mtus, chunk=chunk_sizes, more=st.integers(1, 2**32))
@example(mtu=1408, chunk=None, more=1)
@example(mtu=65_504, chunk=None, more=1)
def test_what_needs_too_many_chunks_cannot_be_carried(mtu: int, chunk: int | None, more: int) -> None:
    """G2: 65535 chunks, and 1 GiB, are the end; the configuration names the same limit as the native plan."""
    sizes = section(mtu, chunk)
    plan = plan_of(sizes)
    assert plan.largest_bytes == sizes.largest_frame_bytes <= MAX_PAYLOAD_BYTES
    assert 1 <= plan.count(plan.largest_bytes) <= MAX_CHUNKS
    assert plan.count(plan.largest_bytes + more) == 0


def test_bad_sizes_are_refused() -> None:
    for first, later in ((0, 1), (1, 0), (2, 1), (1, 65_536)):
        with pytest.raises(ValueError, match="must be 1 to"):
            ChunkPlan(first, later)
    with pytest.raises(ValueError, match="below count"):
        ChunkPlan(10, 10).slice(2, 20)
