# SPDX-License-Identifier: Apache-2.0
"""What a receiver believes of a source: its time, its seqs and epochs, its sessions, its metadata. Without IO."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool._core import AllowedSources, SessionPin, address_of, blake2b, crc32c
from tensorpool.bridge.assembly import SourceMetadata
from tensorpool.bridge.checksum import read_key
from tensorpool.errors import ConfigError
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta
from tests.bridge.frames import EPOCH, POOLS, STREAM, TIMEOUT_NS, Receiving, chunks_of, digest_of, header_of

PAYLOAD = bytes(range(256)) * 8

# --- time and bounds


@pytest.mark.spec("BRG-5.3a-02")
def test_a_frame_whose_time_is_over_is_not_completed_by_a_late_chunk() -> None:
    """Also when the chunk arrives before anybody has looked at the clock."""
    receiving = Receiving()
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(first)
    receiving.now_ns += TIMEOUT_NS  # no call of expire()
    receiving.take(second)
    assert receiving.ring.payload(1) is None
    assert receiving.frames_dropped == {"timeout": 1}
    assert receiving.chunks_dropped == {"dropped_frame": 1}
    receiving.take(*chunks_of(2, PAYLOAD, [1000]))
    assert receiving.ring.payload(2) == PAYLOAD


def test_a_checksum_that_comes_too_late_publishes_nothing() -> None:
    receiving = Receiving(needs_digest=True)
    receiving.take(*chunks_of(1, PAYLOAD))
    crc = crc32c(PAYLOAD, crc32c(header_of(1, PAYLOAD)))
    receiving.now_ns += TIMEOUT_NS
    receiving.take_digest(1, PAYLOAD, crc32c=crc)
    assert receiving.ring.payload(1) is None
    assert receiving.frames_dropped == {"crc": 1}


@pytest.mark.spec("BRG-9-10")
def test_a_dropped_frame_stays_known_until_a_later_one_is_published() -> None:
    """Its progress is not forwarded, though its tombstone is gone."""
    receiving = Receiving()
    receiving.take(*chunks_of(1, PAYLOAD, [1000])[:1])
    receiving.wait()
    assert receiving.assembler.is_lost(1)
    receiving.wait()  # the tombstone has expired
    receiving.wait()
    assert receiving.assembler.is_lost(1)
    assert not receiving.assembler.is_lost(2)
    receiving.take(*chunks_of(2, PAYLOAD))
    assert not receiving.assembler.is_lost(1)  # published says it


def test_a_seq_beyond_what_the_source_can_have_reached_is_not_believed_at_first() -> None:
    """A frame a microsecond, from a jump on; a lasting jump is the source's own after a second."""
    receiving = Receiving()
    receiving.assembler.set_source(EPOCH, POOLS, max_jump=1024)
    receiving.take(*chunks_of(10, PAYLOAD))
    receiving.take(*chunks_of(10 + 1025, PAYLOAD))
    assert receiving.frames_dropped == receiving.chunks_dropped == {"seq_jump": 1}
    receiving.take(*chunks_of(11, PAYLOAD))  # the source is where it was
    receiving.now_ns += 1_000_000
    receiving.take(*chunks_of(11 + 1024 + 1000, PAYLOAD))
    assert receiving.assembler.published == 2035
    receiving.take(*chunks_of(2**40, PAYLOAD))
    receiving.now_ns += 1_000_000_000
    receiving.take(*chunks_of(2**40 + 1, PAYLOAD))
    assert receiving.assembler.published == 2**40 + 1


def test_an_epoch_above_the_limit_ends_no_other() -> None:
    receiving = Receiving()
    receiving.assembler.set_source(EPOCH, POOLS, epoch_limit=EPOCH + 10)
    first, second = chunks_of(1, PAYLOAD, [1000])
    receiving.take(first, *chunks_of(2, b"x", epoch=EPOCH + 11), second)
    assert receiving.ring.payload(1) == PAYLOAD
    assert receiving.assembler.newest_epoch == EPOCH
    receiving.take(*chunks_of(3, b"x", epoch=EPOCH + 10))
    assert receiving.assembler.newest_epoch == EPOCH + 10


@pytest.mark.parametrize(
    ("networks", "address", "is_allowed"),
    [
        ([], "192.0.2.7", True),
        (["192.0.2.7"], "192.0.2.7", True),
        (["192.0.2.7"], "192.0.2.8", False),
        (["192.0.2.0/29"], "192.0.2.7", True),
        (["192.0.2.0/29"], "192.0.2.8", False),
        (["0.0.0.0/0"], "198.51.100.1", True),
        (["0.0.0.0/0"], "2001:db8::1", False),
        (["2001:db8::/33"], "2001:db8:7fff::1", True),
        (["2001:db8::/33"], "2001:db8:8000::1", False),
        (["192.0.2.0/24"], "::ffff:192.0.2.9", True),
        (["10.0.0.0/8", "192.0.2.7"], "192.0.2.7", True),
        (["10.0.0.0/8"], "no address", False),
    ],
)
def test_networks_of_sources(networks: list[str], address: str, is_allowed: bool) -> None:
    assert AllowedSources(networks).allows(address) is is_allowed


def test_a_network_that_is_none_is_refused() -> None:
    for text in ("host", "10.0.0.0/33", "10.0.0.0/x", "::/129", ""):
        with pytest.raises(ValueError, match="expected an address"):
            AllowedSources([text])


def test_the_address_of_a_source_is_without_port_and_scope() -> None:
    assert address_of("192.0.2.7:40123") == "192.0.2.7"
    assert address_of("[2001:db8::1]:40123") == "2001:db8::1"
    assert address_of("[fe80::1%eth0]:40123") == "fe80::1"


# --- authentication


@given(st.binary(max_size=600), st.binary(max_size=64), st.integers(1, 64))
def test_blake2b_is_that_of_the_standard_library(data: bytes, key: bytes, digest_bytes: int) -> None:
    assert blake2b(data, key, digest_bytes) == hashlib.blake2b(data, key=key, digest_size=digest_bytes).digest()


KEY = b"a secret of both ends"


def code(seq: int, *, key: bytes = KEY, epoch: int = EPOCH, stream_id: int = STREAM) -> bytes:
    """As any implementation of BLAKE2b computes it."""
    identity = struct.pack("<IQQI", stream_id, epoch, seq, len(PAYLOAD))
    return hashlib.blake2b(identity + header_of(seq, PAYLOAD) + PAYLOAD, key=key, digest_size=16).digest()


def test_a_frame_is_published_when_its_code_is_right() -> None:
    receiving = Receiving(needs_digest=True, mac_key=KEY)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.ring.payload(1) is None
    receiving.take_digest(1, PAYLOAD, mac=code(1))
    assert receiving.ring.payload(1) == PAYLOAD
    receiving.take_digest(2, PAYLOAD, mac=code(2))
    receiving.take(*chunks_of(2, PAYLOAD, [1000]))
    assert receiving.ring.payload(2) == PAYLOAD


@pytest.mark.parametrize(
    "forged",
    [
        code(1, key=b"another secret of these"),
        code(2),
        code(1, epoch=EPOCH - 1),
        code(1, stream_id=STREAM + 1),
        bytes(16),
        b"",
        code(1)[:15] + bytes([code(1)[15] ^ 1]),
    ],
    ids=["another key", "another seq", "another epoch", "another stream", "zeros", "none", "one bit"],
)
def test_a_frame_is_dropped_when_its_code_is_not(forged: bytes) -> None:
    """Also one that was right for another frame: what was recorded cannot be sent again as something else."""
    receiving = Receiving(needs_digest=True, mac_key=KEY)
    receiving.take_digest(1, PAYLOAD, mac=forged)
    receiving.take(*chunks_of(1, PAYLOAD, [1000]))
    assert receiving.ring.payload(1) is None
    assert receiving.frames_dropped == {"mac": 1}


def test_a_frame_with_another_payload_is_dropped() -> None:
    receiving = Receiving(needs_digest=True, mac_key=KEY)
    receiving.take_digest(1, PAYLOAD, mac=code(1))
    receiving.take(*chunks_of(1, bytes([1]) + PAYLOAD[1:], [1000]))
    assert receiving.frames_dropped == {"mac": 1}


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"x" * 15 + b"\n", 0o600, "this one has 15"),
        (b"x" * 65, 0o600, "this one has 65"),
        (b"x" * 32, 0o640, "chmod 600"),
        (None, 0, "No such file"),
    ],
)
def test_a_key_file_is_secret_and_of_a_fair_length(
    tmp_path: Path, content: bytes | None, mode: int, reason: str
) -> None:
    """The error names the file and what to do, never the key."""
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=reason) as raised:
        read_key(str(path))
    assert "xxx" not in str(raised.value)
    assert read_key("") == b""


def test_a_checksum_message_has_a_code_or_none() -> None:
    router = Receiving().router
    for mac in (b"", bytes(range(16))):
        message = digest_of(1, PAYLOAD, mac=mac)
        assert router.take_digest(message, 1)
        for other in (
            message + b"x",
            message[:-1],
            message[:8],
            b"",
            b"\0" + message[1:],
            message[:2] + b"\0" + message[3:],
        ):
            assert not router.take_digest(other, 1)


def test_a_code_of_another_session_or_stream_is_counted() -> None:
    receiving = Receiving(needs_digest=True, mac_key=KEY)
    receiving.assembler.set_origin(5)
    receiving.take(*chunks_of(1, PAYLOAD))
    assert receiving.router.take_digest(digest_of(1, PAYLOAD, mac=code(1)), receiving.now_ns, 6)
    assert receiving.router.take_digest(digest_of(1, PAYLOAD, mac=code(1), stream_id=STREAM + 1), receiving.now_ns, 5)
    assert receiving.assembler.counts["control_dropped", "session"] == 1
    assert receiving.router.counts["control_dropped", "unknown_stream"] == 1
    assert receiving.ring.payload(1) is None
    assert receiving.router.take_digest(digest_of(1, PAYLOAD, mac=code(1)), receiving.now_ns, 5)
    assert receiving.ring.payload(1) == PAYLOAD


# --- sessions


def test_the_session_of_the_announce_wins_else_the_first_from_its_address() -> None:
    pin = SessionPin()
    assert not pin.admits(1, "10.0.0.7")  # nobody has announced
    pin.set_origin(5, "10.0.0.7")
    assert not pin.admits(1, "10.0.0.8")
    assert pin.admits(2, "10.0.0.7")
    assert not pin.admits(3, "10.0.0.7")
    assert pin.admits(5, "10.9.9.9")  # one sender, two ways
    assert not pin.admits(2, "10.0.0.7")
    pin.set_origin(None)
    assert pin.admits(5, "10.9.9.9")
    pin.on_image_gone(5)
    assert not pin.admits(5, "10.9.9.9")


# --- metadata


def named(epoch: int) -> DataSourceAnnounce:
    return DataSourceAnnounce(stream_id=STREAM, producer_id=1, epoch=epoch, meta_version=1, name="cam")


DESCRIBED = DataSourceMeta(stream_id=STREAM, meta_version=1, timestamp_ns=1)


def test_metadata_of_an_epoch_that_is_over_are_not_published_as_current() -> None:
    metadata = SourceMetadata()
    assert metadata.take(named(3), 3)
    assert metadata.take(DESCRIBED, 3)
    assert metadata.again(3) == [named(3), DESCRIBED]
    assert metadata.on_epoch(4) == []
    assert not metadata.take(DESCRIBED, 4)
    assert metadata.again(4) == []


def test_metadata_of_an_epoch_that_is_not_announced_yet_wait_for_it() -> None:
    metadata = SourceMetadata()
    assert not metadata.take(named(4), 3)
    assert not metadata.take(DESCRIBED, 3)
    assert metadata.on_epoch(4) == [named(4), DESCRIBED]


def test_metadata_that_name_no_epoch_are_of_the_present_one() -> None:
    metadata = SourceMetadata()
    assert metadata.take(DESCRIBED, 3)
    assert metadata.again(3) == [DESCRIBED]
    assert metadata.on_epoch(4) == []
