# SPDX-License-Identifier: Apache-2.0
"""One valid message of each kind that the codec's tests change or damage."""

from __future__ import annotations

import struct

from tensorpool.wire import bridge, control, discovery, event

DESCRIPTOR = control.FrameDescriptor(stream_id=10000, epoch=7, seq=5)
HELLO = control.ConsumerHello(
    stream_id=10000,
    consumer_id=9,
    supports_shm=True,
    supports_progress=False,
    mode=control.Mode.STREAM,
    max_rate_hz=0,
    expected_layout_version=1,
    descriptor_stream_id=0,
    control_stream_id=0,
)
POOL = control.PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=4096, region_uri="shm:file?path=/p/1.pool")
ANNOUNCE = control.ShmPoolAnnounce(
    stream_id=10000,
    producer_id=3,
    epoch=7,
    announce_timestamp_ns=1000,
    announce_clock_domain=control.ClockDomain.MONOTONIC,
    layout_version=1,
    header_nslots=8,
    header_slot_bytes=256,
    payload_pools=(POOL, POOL),
    header_region_uri="shm:file?path=/p/h",
)
TENSOR = control.TensorHeader(
    dtype=control.Dtype.FLOAT32,
    major_order=control.MajorOrder.ROW,
    ndims=2,
    progress_unit=control.ProgressUnit.NONE,
    progress_stride_bytes=0,
    dims=(2, 3, 0, 0, 0, 0, 0, 0),
    strides=(0,) * 8,
)
CHUNK = bridge.BridgeFrameChunk(
    stream_id=10000,
    epoch=7,
    seq=5,
    chunk_index=0,
    chunk_count=1,
    chunk_offset=0,
    chunk_length=2,
    payload_length=2,
    header_included=False,
    payload_bytes=b"\xaa\xbb",
)
REQUEST = discovery.DiscoveryRequest(
    request_id=1,
    client_id=3,
    response_stream_id=7004,
    tags=(discovery.Tag(tag="a"), discovery.Tag(tag="bc")),
    response_channel="aeron:ipc",
)
EVENT = event.EventMessage(timestamp_ns=1, correlation_id=2, format=event.Format.STRING, tag="t", key="k", value=b"v")


def u16(value: int) -> bytes:
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)
