# SPDX-License-Identifier: Apache-2.0
"""Messages, superblocks and slots against bytes that were laid out by hand."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tensorpool.wire import Message, bridge, control, decode, discovery, event, trace
from tensorpool.wire.control import (
    Attribute,
    ClockDomain,
    ConsumerConfig,
    ConsumerHello,
    ControlResponse,
    DataSourceAnnounce,
    DataSourceMeta,
    Dtype,
    FrameDescriptor,
    FrameProgress,
    FrameProgressState,
    MajorOrder,
    Mode,
    PayloadPool,
    ProgressUnit,
    QosConsumer,
    QosProducer,
    RegionType,
    ShmPoolAnnounce,
    ShmRegionSuperblock,
    SlotHeader,
    TensorHeader,
)
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, DiscoveryStatus, Result, Tag
from tensorpool.wire.driver import (
    HugepagesPolicy,
    LeaseRevokeReason,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShmLeaseKeepalive,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support.messages import CHUNK

MAGIC = 0x544F504C53484D31
TENSOR = TensorHeader(
    dtype=Dtype.FLOAT32,
    major_order=MajorOrder.ROW,
    ndims=2,
    progress_unit=ProgressUnit.NONE,
    progress_stride_bytes=0,
    dims=(2, 3, 0, 0, 0, 0, 0, 0),
    strides=(0,) * 8,
)


def from_hex(text: str) -> bytes:
    """Bytes from hex digits, where "ff*8" repeats a byte."""
    pairs = (part.partition("*") for part in text.split())
    return b"".join(bytes.fromhex(byte) * int(times or 1) for byte, _, times in pairs)


def golden(claim: pytest.MarkDecorator, message: Message, text: str) -> Any:
    """A message, its bytes, and the requirements that they prove."""
    return pytest.param(message, from_hex(text), id=type(message).__name__, marks=claim)


@pytest.mark.spec("WIRE-6-02", "WIRE-16-03")
@pytest.mark.parametrize(
    ("message", "data"),
    [
        golden(
            pytest.mark.spec("WIRE-16-01", "WIRE-16-09", "WIRE-10.1-01", "WIRE-10.1-02", "WIRE-10.1-03"),
            FrameDescriptor(stream_id=10000, epoch=7, seq=5),
            """28 00 04 00 84 03 01 00
            10 27 00 00 07 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 ff*8 ff*4 00*8""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-10"),
            FrameProgress(
                stream_id=10000, epoch=7, seq=5, payload_bytes_filled=4096, state=FrameProgressState.PROGRESS
            ),
            """1d 00 0b 00 84 03 01 00
            10 27 00 00 07 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00 02""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-11"),
            QosConsumer(
                stream_id=10000,
                consumer_id=9,
                epoch=7,
                last_seq_seen=5,
                drops_gap=1,
                drops_late=2,
                mode=Mode.STREAM,
            ),
            """29 00 05 00 84 03 01 00
            10 27 00 00 09 00 00 00 07 00*7 05 00*7 01 00*7 02 00*7 01""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-12", "WIRE-10.1-01", "WIRE-10.1-03"),
            QosProducer(stream_id=10000, producer_id=3, epoch=7, current_seq=5),
            "1c 00 06 00 84 03 01 00 10 27 00 00 03 00 00 00 07 00*7 05 00*7 ff*4",
        ),
        golden(
            pytest.mark.spec("WIRE-16-07", "WIRE-10.1-01", "WIRE-10.1-03", "WIRE-10.1-04", "WIRE-10.1-05"),
            ConsumerHello(
                stream_id=10000,
                consumer_id=9,
                supports_shm=True,
                supports_progress=False,
                mode=Mode.STREAM,
                max_rate_hz=0,
                expected_layout_version=1,
                descriptor_stream_id=0,
                control_stream_id=0,
            ),
            """27 00 02 00 84 03 01 00
            10 27 00 00 09 00 00 00 01 00 01 00*4 01 00 00 00 ff*12 00*8 00*4 00*4""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-08", "WIRE-10.1-04", "WIRE-10.1-05"),
            ConsumerConfig(
                stream_id=10000,
                consumer_id=9,
                use_shm=True,
                mode=Mode.STREAM,
                descriptor_stream_id=0,
                control_stream_id=0,
            ),
            "12 00 03 00 84 03 01 00 10 27 00 00 09 00 00 00 01 01 00*8 00*4 00*4 00*4",
        ),
        golden(
            pytest.mark.spec("WIRE-16-04", "WIRE-16-06"),
            ShmPoolAnnounce(
                stream_id=10000,
                producer_id=3,
                epoch=7,
                announce_timestamp_ns=1000,
                announce_clock_domain=ClockDomain.MONOTONIC,
                layout_version=1,
                header_nslots=8,
                header_slot_bytes=256,
                payload_pools=(
                    PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=4096, region_uri="shm:file?path=/p/1.pool"),
                ),
                header_region_uri="shm:file?path=/p/h",
            ),
            """23 00 01 00 84 03 01 00
            10 27 00 00 03 00 00 00 07 00*7 e8 03 00*6 01 01 00 00 00 08 00 00 00 00 01
            0a 00 01 00 01 00 08 00 00 00 00 10 00 00
            17 00 00 00 73 68 6d 3a 66 69 6c 65 3f 70 61 74 68 3d 2f 70 2f 31 2e 70 6f 6f 6c
            12 00 00 00 73 68 6d 3a 66 69 6c 65 3f 70 61 74 68 3d 2f 70 2f 68""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-13", "WIRE-10.3.1-02"),
            DataSourceAnnounce(stream_id=10000, producer_id=3, epoch=7, meta_version=2, name="cam", summary="s"),
            """14 00 07 00 84 03 01 00 10 27 00 00 03 00 00 00 07 00*7 02 00 00 00
            03 00 00 00 63 61 6d 01 00 00 00 73""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-14", "WIRE-16-04", "WIRE-10.3.2-02"),
            DataSourceMeta(
                stream_id=10000,
                meta_version=2,
                timestamp_ns=9,
                attributes=(Attribute(key="k", format="f/g", value=b"\xfe\x00"), Attribute(key="e")),
            ),
            """10 00 08 00 84 03 01 00 10 27 00 00 02 00 00 00 09 00*7
            00 00 02 00 01 00 00 00 6b 03 00 00 00 66 2f 67 02 00 00 00 fe 00 01 00 00 00 65 00*4 00*4""",
        ),
        golden(
            pytest.mark.spec("WIRE-16-15", "WIRE-15.17-01"),
            ControlResponse(correlation_id=-2, code=control.ResponseCode.REJECTED, error_message="no"),
            "0c 00 09 00 84 03 01 00 fe ff*7 03 00 00 00 02 00 00 00 6e 6f",
        ),
        golden(
            pytest.mark.spec("WIRE-16-16", "WIRE-8.2-01"),
            TENSOR,
            "b8 00 34 00 84 03 01 00 09 00 01 00 02 00 00 00*4 02 00 00 00 03 00 00 00 00*24 00*32 00*109",
        ),
        golden(
            pytest.mark.spec("DRV-A-02"),
            ShmAttachRequest(
                correlation_id=42,
                stream_id=10000,
                client_id=3,
                role=Role.PRODUCER,
                expected_layout_version=0,
                max_dims=0,
                publish_mode=PublishMode.EXISTING_OR_CREATE,
                require_hugepages=HugepagesPolicy.UNSPECIFIED,
            ),
            "18 00 01 00 85 03 01 00 2a 00*7 10 27 00 00 03 00 00 00 01 00 00 00 00 00 02 00",
        ),
        golden(
            pytest.mark.spec("DRV-A-02"),
            ShmAttachRequest(
                correlation_id=42,
                stream_id=10000,
                client_id=3,
                role=Role.CONSUMER,
                expected_layout_version=1,
                max_dims=8,
                require_hugepages=HugepagesPolicy.HUGEPAGES,
            ),
            "18 00 01 00 85 03 01 00 2a 00*7 10 27 00 00 03 00 00 00 02 01 00 00 00 08 ff 02",
        ),
        golden(
            pytest.mark.spec("DRV-A-03", "WIRE-10.1-01", "WIRE-10.1-02", "WIRE-10.1-03"),
            ShmAttachResponse(correlation_id=42, code=ResponseCode.REJECTED, error_message="no"),
            """33 00 02 00 85 03 01 00 2a 00*7 03 00 00 00 ff*8 ff*8 ff*4 ff*8 ff*4 ff*4 ff*2 ff
            0a 00 00 00 00 00 00 00 02 00 00 00 6e 6f""",
        ),
        golden(
            pytest.mark.spec("DRV-A-04"),
            ShmDetachRequest(correlation_id=43, lease_id=11, stream_id=10000, client_id=3, role=Role.PRODUCER),
            "19 00 03 00 85 03 01 00 2b 00*7 0b 00*7 10 27 00 00 03 00 00 00 01",
        ),
        golden(
            pytest.mark.spec("DRV-A-05"),
            ShmDetachResponse(correlation_id=43, code=ResponseCode.OK, error_message="e"),
            "0c 00 04 00 85 03 01 00 2b 00*7 00 00 00 00 01 00 00 00 65",
        ),
        golden(
            pytest.mark.spec("DRV-A-06"),
            ShmLeaseKeepalive(lease_id=11, stream_id=10000, client_id=3, role=Role.PRODUCER, client_timestamp_ns=99),
            "19 00 05 00 85 03 01 00 0b 00*7 10 27 00 00 03 00 00 00 01 63 00*7",
        ),
        golden(
            pytest.mark.spec("DRV-A-07"),
            ShmDriverShutdown(timestamp_ns=99, reason=ShutdownReason.ERROR, error_message="e"),
            "09 00 06 00 85 03 01 00 63 00*7 02 01 00 00 00 65",
        ),
        golden(
            pytest.mark.spec("DRV-A-09"),
            ShmLeaseRevoked(
                timestamp_ns=99,
                lease_id=11,
                stream_id=10000,
                client_id=3,
                role=Role.PRODUCER,
                reason=LeaseRevokeReason.EXPIRED,
            ),
            "1a 00 07 00 85 03 01 00 63 00*7 0b 00*7 10 27 00 00 03 00 00 00 01 02 00*4",
        ),
        golden(
            pytest.mark.spec("DRV-A-08"),
            ShmDriverShutdownRequest(correlation_id=1, reason=ShutdownReason.ADMIN, token="t"),
            "09 00 08 00 85 03 01 00 01 00*7 01 01 00 00 00 74 00 00 00 00",
        ),
        golden(
            pytest.mark.spec("BRG-11-01"),
            bridge.BridgeFrameChunk(**CHUNK, payload_bytes=b"\xaa\xbb"),
            """29 00 01 00 86 03 01 00 10 27 00 00 07 00*7 05 00*7 01 00 00 00 02 00 00 00 04 00 00 00
            02 00 00 00 06 00 00 00 00 00 00 00 00 02 00 00 00 aa bb""",
        ),
        golden(
            pytest.mark.spec("DISC-15-01", "DISC-15-04", "WIRE-10.1-01", "WIRE-10.1-02", "WIRE-10.1-03"),
            DiscoveryRequest(
                request_id=1,
                client_id=3,
                response_stream_id=7004,
                tags=(Tag(tag="a"),),
                response_channel="aeron:ipc",
            ),
            """20 00 01 00 8e 03 01 00 01 00*7 03 00 00 00 5c 1b 00 00 ff*4 ff*4 ff*8
            00 00 01 00 01 00 00 00 61 09 00 00 00 61 65 72 6f 6e 3a 69 70 63 00 00 00 00""",
        ),
        golden(
            pytest.mark.spec("DISC-15-02"),
            DiscoveryResponse(request_id=1, status=DiscoveryStatus.OK),
            "09 00 02 00 8e 03 01 00 01 00*7 01 27 00 00 00 00 00 00 00",
        ),
        golden(
            pytest.mark.spec("DISC-15-02", "DISC-15-03", "DISC-15-04"),
            DiscoveryResponse(
                request_id=1,
                status=DiscoveryStatus.OK,
                results=(
                    Result(
                        stream_id=10000,
                        producer_id=3,
                        epoch=7,
                        layout_version=1,
                        header_nslots=8,
                        header_slot_bytes=256,
                        max_dims=8,
                        data_source_id=0x1122334455667788,
                        driver_control_stream_id=1000,
                        payload_pools=(
                            discovery.PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=4096, region_uri="u"),
                        ),
                        tags=(Tag(tag="a"),),
                        header_region_uri="h",
                        data_source_name="n",
                        driver_instance_id="i",
                        driver_control_channel="c",
                    ),
                ),
                error_message="e",
            ),
            """09 00 02 00 8e 03 01 00 01 00*7 01 27 00 01 00
            10 27 00 00 03 00 00 00 07 00*7 01 00 00 00 08 00 00 00 00 01 08
            88 77 66 55 44 33 22 11 e8 03 00 00
            0a 00 01 00 01 00 08 00 00 00 00 10 00 00 01 00 00 00 75
            00 00 01 00 01 00 00 00 61
            01 00 00 00 68 01 00 00 00 6e 01 00 00 00 69 01 00 00 00 63
            01 00 00 00 65""",
        ),
        golden(
            pytest.mark.spec("CTL-5.1-03", "CTL-5.1-04"),
            event.EventMessage(
                timestamp_ns=5, correlation_id=-1, format=event.Format.STRING, tag="s", key="k", value=b"v"
            ),
            """28 00 01 00 89 03 01 00 05 00*7 ff*8 0c 00 00 00 ff*4 ff*8 ff*8
            01 00 00 00 73 01 00 00 00 6b 01 00 00 00 76""",
        ),
        golden(
            pytest.mark.spec("CTL-5.1-03"),
            event.EventMessage(
                timestamp_ns=5,
                correlation_id=6,
                format=event.Format.REF,
                ref_stream_id=10000,
                ref_epoch=7,
                ref_seq=8,
            ),
            """28 00 01 00 89 03 01 00 05 00*7 06 00*7 0f 00 00 00 10 27 00 00 07 00*7 08 00*7
            00*4 00*4 00*4""",
        ),
    ],
)
def test_messages_have_the_bytes_of_the_specification(message: Message, data: bytes) -> None:
    """Header, fields, groups and data lie where the schema puts them, in both directions."""
    assert message.encode() == data
    assert decode(data) == message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            control.MetaBlobAnnounce(stream_id=1, meta_version=2, blob_type=3, total_len=4, checksum=5),
            "1c 00 0a 00 84 03 01 00 01 00 00 00 02 00 00 00 03 00 00 00 04 00*7 05 00*7",
        ),
        (
            control.MetaBlobChunk(stream_id=1, meta_version=2, chunk_offset=3, chunk_bytes=b"\xab"),
            "10 00 0c 00 84 03 01 00 01 00 00 00 02 00 00 00 03 00*7 01 00 00 00 ab",
        ),
        (
            control.MetaBlobComplete(stream_id=1, meta_version=2, checksum=3),
            "10 00 0d 00 84 03 01 00 01 00 00 00 02 00 00 00 03 00*7",
        ),
        (
            trace.TraceLinkSet(
                stream_id=1,
                epoch=2,
                seq=3,
                trace_id=4,
                parents=(trace.Parent(trace_id=5), trace.Parent(trace_id=6)),
            ),
            """1c 00 01 00 88 03 01 00 01 00 00 00 02 00*7 03 00*7 04 00*7
            08 00 02 00 05 00*7 06 00*7""",
        ),
    ],
)
def test_messages_that_the_specifications_only_name_have_the_decided_bytes(message: Message, text: str) -> None:
    """Meta blobs and trace links follow decision A11."""
    data = from_hex(text)
    assert message.encode() == data
    assert decode(data) == message


@pytest.mark.spec("WIRE-7.1-01", "WIRE-7.1-02", "WIRE-6-02")
def test_a_superblock_is_64_bytes_that_start_with_the_magic_value() -> None:
    """Fields lie at the schema's offsets, and the magic is a little-endian u64, not a string."""
    block = ShmRegionSuperblock(
        magic=MAGIC,
        layout_version=1,
        epoch=7,
        stream_id=10000,
        region_type=RegionType.HEADER_RING,
        pool_id=0,
        nslots=8,
        slot_bytes=256,
        stride_bytes=0,
        pid=1234,
        start_timestamp_ns=1,
        activity_timestamp_ns=2,
    )
    data = bytes.fromhex(
        "314d4853 4c504f54 01000000 07000000 00000000 10270000 0100 0000 08000000"
        "00010000 00000000 d2040000 00000000 01000000 00000000 02000000 00000000"
    )
    assert len(data) == 64
    assert block.encode_body() == data
    assert ShmRegionSuperblock.decode_body(data) == block


@pytest.mark.spec("WIRE-8.2-03", "WIRE-8.2-04", "WIRE-8.2-05", "WIRE-16-16")
def test_a_slot_is_a_bare_body_with_an_embedded_tensor_header() -> None:
    """seq_commit is at byte 0, the length 192 at 60, a message header at 64, dims at 83, strides at 115."""
    header = TensorHeader(
        dtype=Dtype.FLOAT32,
        major_order=MajorOrder.ROW,
        ndims=2,
        progress_unit=ProgressUnit.NONE,
        progress_stride_bytes=0,
        dims=(2, 3, 0, 0, 0, 0, 0, 0),
        strides=(12, 4, 0, 0, 0, 0, 0, 0),
    )
    slot = SlotHeader(
        seq_commit=11,
        values_len_bytes=24,
        payload_slot=5,
        pool_id=1,
        payload_offset=0,
        timestamp_ns=77,
        meta_version=1,
        header_bytes=header.encode(),
    )
    data = bytes.fromhex(
        "0b000000 00000000 18000000 05000000 0100 00000000 4d000000 00000000 01000000" + "00" * 26 + "c0000000"
        "b800 3400 8403 0100"
        "0900 0100 02 00 00 00000000" + "02000000 03000000" + "00" * 24 + "0c000000 04000000" + "00" * 24 + "00" * 109
    )
    assert len(data) == 256
    assert slot.encode_body() == data
    assert SlotHeader.decode_body(data) == slot
    assert decode(data[64:]) == header
    assert struct.unpack_from("<2i", data, 83) == (2, 3)
    assert struct.unpack_from("<2i", data, 115) == (12, 4)
