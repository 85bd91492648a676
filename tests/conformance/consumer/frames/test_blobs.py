# SPDX-License-Identifier: Apache-2.0
"""Metadata by version, and blobs with a flaw. Wire §10.3."""

from __future__ import annotations

import pytest

from tensorpool.client import Consumer
from tensorpool.wire.control import Attribute, DataSourceMeta, MetaBlobAnnounce, MetaBlobChunk, MetaBlobComplete
from tests.support.checksums import crc32c
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer


@pytest.mark.spec("WIRE-10.3.2-04")
def test_metadata_is_known_by_its_version(peer: WireProducer, consumer: Consumer) -> None:
    """Text and JSON attributes as what they hold, others as bytes; also keys and formats that are not defined."""
    attributes = (
        Attribute(key="camera", format="text/plain", value=b"front"),
        Attribute(key="exposure", format="application/json", value=b'{"ms": 4}'),
        Attribute(key="unknown", format="sbe:77.3", value=b"\x00\xff"),
    )

    def is_known() -> bool:
        peer.say(DataSourceMeta, meta_version=3, attributes=attributes)  # periodically, as producers do
        peer.say(DataSourceMeta, meta_version=4, attributes=attributes[:1])
        known = (consumer.metadata(3), consumer.metadata(4))
        return None not in known

    wait_until(is_known, "the metadata is known")
    known = consumer.metadata(3)
    assert known is not None
    assert known.attributes == {"camera": "front", "exposure": {"ms": 4}, "unknown": b"\x00\xff"}
    wait_until(lambda: (it := consumer.metadata()) and it.meta_version == 4, "the last one is the newest")
    newest = consumer.metadata()
    assert newest is not None
    assert (newest.meta_version, newest.attributes) == (4, {"camera": "front"})


BLOB = bytes(range(256)) * 3
WHOLE = [(0, BLOB[:300]), (300, BLOB[300:600]), (600, BLOB[600:])]
BROKEN_BLOBS: dict[str, tuple[list[tuple[int, bytes]], int, int]] = {
    "a gap": ([WHOLE[0], WHOLE[2]], len(BLOB), 0),
    "an overlap": ([WHOLE[0], (299, BLOB[299:600]), WHOLE[2]], len(BLOB), 0),
    "a chunk twice": ([WHOLE[0], WHOLE[0], WHOLE[1], WHOLE[2]], len(BLOB), 0),
    "backwards": (WHOLE[::-1], len(BLOB), 0),
    "an end missing": (WHOLE[:2], len(BLOB), 0),
    "more than announced": (WHOLE, len(BLOB) - 1, 0),
    "another checksum": (WHOLE, len(BLOB), crc32c(BLOB) ^ 1),
    "a flipped bit": ([WHOLE[0], (300, b"\x00" + BLOB[301:600]), WHOLE[2]], len(BLOB), crc32c(BLOB)),
}


def send_blob(peer: WireProducer, version: int, chunks: list[tuple[int, bytes]], total: int, checksum: int) -> None:
    peer.say(MetaBlobAnnounce, meta_version=version, blob_type=5, total_len=total, checksum=checksum)
    for offset, data in chunks:
        peer.say(MetaBlobChunk, meta_version=version, chunk_offset=offset, chunk_bytes=data)
    peer.say(MetaBlobComplete, meta_version=version, checksum=checksum)


@pytest.mark.spec("WIRE-10.3.3-02", "WIRE-15.9-02")
def test_a_blob_with_a_flaw_is_discarded(peer: WireProducer, consumer: Consumer) -> None:
    """Gap, overlap, repetition, wrong length, wrong checksum: no blob; without a flaw it is one, checksum or not."""

    def is_listening() -> bool:
        peer.say(DataSourceMeta)
        return consumer.metadata() is not None

    wait_until(is_listening, "the consumer hears the metadata stream")
    for version, (chunks, total, checksum) in enumerate(BROKEN_BLOBS.values(), start=10):
        send_blob(peer, version, chunks, total, checksum)
    send_blob(peer, 8, WHOLE, len(BLOB), crc32c(BLOB))
    send_blob(peer, 9, WHOLE, len(BLOB), 0)
    wait_until(lambda: consumer.blob(5, 9) is not None, "the last blob is there")
    assert consumer.blob(5, 8) == consumer.blob(5, 9) == BLOB
    for version, name in enumerate(BROKEN_BLOBS, start=10):
        assert consumer.blob(5, version) is None, name
