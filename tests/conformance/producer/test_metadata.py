# SPDX-License-Identifier: Apache-2.0
"""What a producer sends beside its frames: QoS, metadata and blobs. Wire §10.3, §10.4.2."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import pytest

from tensorpool.client import Producer
from tensorpool.wire.control import (
    DataSourceAnnounce,
    DataSourceMeta,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
    QosProducer,
)
from tests.conformance.producer.conftest import descriptors
from tests.support.checksums import crc32c
from tests.support.wire_consumer import MappedStream, WireConsumer


@pytest.mark.spec("WIRE-10.4.2-02", "WIRE-10.4.2-01")
def test_qos_tells_who_produces_and_how_far_it_is(peer: WireConsumer, producer: Producer) -> None:
    """stream, producer, epoch and the last committed seq, byte for byte, again and again."""
    last = [producer.publish(np.zeros(3)) for _ in range(5)][-1]
    received = peer.wait_for(QosProducer, stream_id=producer.stream_id, current_seq=last)
    names = (producer.stream_id, producer.producer_id, producer.epoch)
    assert received.data == struct.pack("<4H I I Q Q I", 28, 6, 900, 1, *names, last, 2**32 - 1)
    assert received.stream_id == peer.endpoints["qos"][1]
    peer.wait_for(QosProducer, received.index + 1, stream_id=producer.stream_id, current_seq=last)


@pytest.mark.spec("WIRE-10.3.1-02")
@pytest.mark.spec("WIRE-10.3.1-03", "WIRE-10.3.2-01", "WIRE-10.3.2-03", "WIRE-10.3.1-01")
def test_metadata_is_sent_on_change_and_again_and_frames_name_its_version(
    peer: WireConsumer, producer: Producer, mapped: MappedStream
) -> None:
    """Every change has a higher version; slot and descriptor name the one that applies; announces show the newest."""
    versions: list[int] = []
    for exposure in (4, 5):
        version = producer.set_metadata({"camera": "front", "exposure_ms": exposure, "mask": b"\x01\x02"}, tags=["lab"])
        versions.append(version)
        received = peer.wait_for(DataSourceMeta, stream_id=producer.stream_id, meta_version=version)
        found = {it.key: (it.format, it.value) for it in received.message.attributes}
        assert found["camera"] == ("text/plain", b"front")
        assert found["exposure_ms"] == ("application/json", str(exposure).encode())
        assert found["mask"][1] == b"\x01\x02"
        assert "tags" in found
        peer.wait_for(DataSourceMeta, received.index + 1, stream_id=producer.stream_id, meta_version=version)
        announce = peer.wait_for(DataSourceAnnounce, received.index, stream_id=producer.stream_id, meta_version=version)
        assert (announce.message.producer_id, announce.message.epoch) == (producer.producer_id, producer.epoch)
        assert {received.stream_id, announce.stream_id} == {peer.endpoints["metadata"][1]}
        seq = producer.publish(np.zeros(3))
        assert seq is not None
        assert mapped.slot(seq).meta_version == version
        assert descriptors(peer, producer, seq)[-1].meta_version in (None, version)
    assert versions[0] < versions[1]
    assert producer.publish(np.zeros(3), meta_version=versions[0]) is not None
    assert mapped.slot(producer.next_seq - 1).meta_version == versions[0]


@pytest.mark.spec("WIRE-10.3.3-01", "WIRE-15.9-01", "WIRE-15.9-02")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("length", [0, 1, 65_536, 200_000])
def test_a_blob_is_cut_into_chunks_that_cover_it(
    peer: WireConsumer, producer: Producer, length: int, checksum: bool
) -> None:
    """Offsets from 0 on, each where the last ended, at most 64 KiB a piece, up to total_len; CRC32C or 0."""
    blob = os.urandom(length)
    version = producer.publish_blob(blob, blob_type=5, checksum=checksum)
    names: dict[str, Any] = {"stream_id": producer.stream_id, "meta_version": version}
    announce = peer.wait_for(MetaBlobAnnounce, **names)
    complete = peer.wait_for(MetaBlobComplete, announce.index, **names)
    chunks = [it for it in peer.received(MetaBlobChunk, announce.index, **names) if it.index < complete.index]
    assert (announce.message.total_len, announce.message.blob_type) == (length, 5)
    data = b""
    for received in chunks:
        assert received.message.chunk_offset == len(data)
        assert 0 < len(received.message.chunk_bytes) <= 65_536
        data += received.message.chunk_bytes
    assert data == blob
    assert announce.message.checksum == complete.message.checksum
    assert (announce.message.checksum != 0) == (checksum and length > 0)
    if length == 1 and checksum:
        assert announce.message.checksum == crc32c(blob)
