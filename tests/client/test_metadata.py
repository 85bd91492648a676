# SPDX-License-Identifier: Apache-2.0
"""What frames mean: attributes as they travel, blobs in chunks, and what a consumer keeps of them."""

from __future__ import annotations

from typing import Any

import google_crc32c
import msgspec
import pytest

from tensorpool.client.metadata import CHUNK_MAX, MAX_BLOB_BYTES, MAX_KEPT, Metadata, MetadataCache, blob_messages
from tensorpool.client.metadata import to_message as to_wire
from tensorpool.errors import LocalProtocolError
from tensorpool.wire import Message, decode
from tensorpool.wire.control import (
    Attribute,
    DataSourceAnnounce,
    DataSourceMeta,
    MetaBlobAnnounce,
    MetaBlobChunk,
    MetaBlobComplete,
)
from tests.client.conftest import STREAM


def to_message(attributes: dict[Any, Any], tags: tuple[Any, ...] = (), version: int = 1) -> DataSourceMeta:
    return to_wire(STREAM, version, attributes, tags, 5)


def travelled(attributes: dict[Any, Any], tags: tuple[Any, ...] = ()) -> Metadata:
    """As a consumer sees it, the bytes in between included."""
    message = decode(to_message(attributes, tags).encode())
    assert isinstance(message, DataSourceMeta)
    return Metadata.of(message)


def cached(*messages: Message) -> MetadataCache:
    cache = MetadataCache()
    for message in messages:
        cache.on_message(message)
    return cache


# --- attributes


@pytest.mark.parametrize(
    ("value", "format", "seen"),
    [
        ("Ångström", "text/plain", "Ångström"),
        ("", "text/plain", ""),
        (b"\x00\xff", "application/octet-stream", b"\x00\xff"),
        (bytearray(b"ab"), "application/octet-stream", b"ab"),
        (memoryview(b"ab"), "application/octet-stream", b"ab"),
        (3, "application/json", 3),
        (2.5, "application/json", 2.5),
        (None, "application/json", None),
        (True, "application/json", True),
        ({"fx": [1, 2.5], "é": None}, "application/json", {"fx": [1, 2.5], "é": None}),
        ((1, 2), "application/json", [1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.spec("WIRE-10.3.2-02")
def test_an_attribute_arrives_as_what_it_was(value: Any, format: str, seen: Any) -> None:
    """Text as text, bytes as bytes, everything else by JSON."""
    metadata = travelled({"serial": value})
    assert metadata.attributes == {"serial": seen}
    assert metadata.formats == {"serial": format}
    assert (metadata.meta_version, metadata.timestamp_ns, metadata.tags) == (1, 5, ())


def test_attributes_keep_their_order_and_tags_are_apart() -> None:
    """Tags travel as one attribute that the API does not show (F5)."""
    metadata = travelled({"b": 1, "a": "x"}, ("raw", "left eye"))
    assert list(metadata.attributes) == ["b", "a"]
    assert metadata.tags == ("raw", "left eye")
    assert "tags" not in metadata.formats


@pytest.mark.parametrize("key", ["", "é", 3, None, "tags"])
def test_a_key_that_cannot_travel_is_refused(key: Any) -> None:
    """Keys are ASCII, and one of them is taken."""
    with pytest.raises(LocalProtocolError, match="key"):
        to_message({key: 1})


@pytest.mark.parametrize("tag", ["", "a,b", "é", 3, None])
def test_a_tag_that_cannot_travel_is_refused(tag: Any) -> None:
    """Commas are what divides them."""
    with pytest.raises(LocalProtocolError, match="tag"):
        to_message({}, ("fine", tag))


@pytest.mark.parametrize("tag", [" ", " left", "left ", "\t"])
def test_a_tag_arrives_as_it_was_given_or_is_refused(tag: str) -> None:
    """Blanks at its ends are not lost on the way."""
    try:
        metadata = travelled({}, (tag, "other"))
    except LocalProtocolError:
        return
    assert metadata.tags == (tag, "other")


@pytest.mark.parametrize(
    "value",
    [object(), {1, object()}, {"x": {(1, 2): 3}}, "\ud800", {"x": "\ud800"}],
    ids=["object", "set", "keys", "text", "inside"],
)
def test_a_value_that_cannot_travel_is_refused_by_its_key(value: Any) -> None:
    """LocalProtocolError, with the attribute's name."""
    with pytest.raises(LocalProtocolError, match="intrinsics"):
        to_message({"intrinsics": value})


def meta_of(*attributes: tuple[str, str, bytes], version: int = 1, timestamp_ns: int = 5) -> DataSourceMeta:
    entries = tuple(Attribute(key=key, format=format, value=value) for key, format, value in attributes)
    return DataSourceMeta(stream_id=STREAM, meta_version=version, timestamp_ns=timestamp_ns, attributes=entries)


@pytest.mark.spec("WIRE-10.3.2-04")
def test_what_is_not_what_it_claims_to_be_stays_bytes() -> None:
    """And unknown formats are left to the application."""
    metadata = Metadata.of(
        meta_of(
            ("text", "text/plain", b"\xff\xfe"),
            ("json", "application/json", b"{"),
            ("empty", "application/json", b""),
            ("sbe", "sbe:900.52", b"\x01\x02"),
            ("none", "", b"x"),
        )
    )
    assert metadata.attributes == {"text": b"\xff\xfe", "json": b"{", "empty": b"", "sbe": b"\x01\x02", "none": b"x"}
    assert metadata.formats["sbe"] == "sbe:900.52"


@pytest.mark.parametrize(
    ("format", "value", "tags"),
    [
        ("text/plain", b"a, b ,,c", ("a", "b", "c")),
        ("application/json", b'["a", 3, "b,c", null]', ("a", "b,c")),
        ("application/json", b'{"a": 1}', ()),
        ("application/json", b"[", ()),
        ("application/octet-stream", b"a,b", ()),
    ],
)
def test_tags_of_others_are_read_in_both_ways(format: str, value: bytes, tags: tuple[str, ...]) -> None:
    """F5: text with commas, or a JSON array; anything else is no tags."""
    metadata = Metadata.of(meta_of(("tags", format, value)))
    assert (metadata.tags, metadata.attributes) == (tags, {})


def test_a_key_that_comes_twice_has_its_last_value() -> None:
    """Whatever a producer sends, a mapping has each key once."""
    assert Metadata.of(meta_of(("k", "text/plain", b"1"), ("k", "text/plain", b"2"))).attributes == {"k": "2"}


# --- what is kept


def test_metadata_is_found_by_its_version_and_the_last_without_one() -> None:
    """Frames that are still under way name an earlier one."""
    cache = cached(meta_of(("k", "text/plain", b"1")), meta_of(("k", "text/plain", b"2"), version=2))
    first, second, newest = cache.get(1), cache.get(2), cache.get()
    assert first is not None
    assert second is not None
    assert (first.attributes, second.attributes) == ({"k": "1"}, {"k": "2"})
    assert newest is second
    assert cache.get(3) is None
    assert MetadataCache().get() is None


def test_a_version_that_is_repeated_is_the_same_object() -> None:
    """It comes every second; a caller that compares by identity sees no change."""
    cache = cached(meta_of(("k", "text/plain", b"1")))
    before = cache.get(1)
    cache.on_message(meta_of(("k", "text/plain", b"1")))
    assert cache.get(1) is before


def test_a_version_that_was_made_anew_replaces_the_old_one() -> None:
    """A producer that was restarted counts from 1 again."""
    cache = cached(meta_of(("k", "text/plain", b"1")), meta_of(("k", "text/plain", b"2"), timestamp_ns=6))
    metadata = cache.get(1)
    assert metadata is not None
    assert metadata.attributes == {"k": "2"}


def test_only_so_many_versions_are_kept() -> None:
    """The oldest goes."""
    cache = cached(*(meta_of(version=version) for version in range(MAX_KEPT + 1)))
    assert cache.get(0) is None
    assert cache.get(1) is not None
    assert cache.get() is cache.get(MAX_KEPT)


def source_of(epoch: int, version: int = 1) -> DataSourceAnnounce:
    return DataSourceAnnounce(stream_id=STREAM, producer_id=1, epoch=epoch, meta_version=version)


def attributes(cache: MetadataCache, version: int | None = 1, epoch: int | None = None) -> object:
    known = cache.get(version, epoch)
    return None if known is None else known.attributes


@pytest.mark.spec("WIRE-10.3.2-03")
@pytest.mark.parametrize("session", [1, 2], ids=["one process", "two processes"])
def test_versions_of_two_producers_are_two_things(session: int) -> None:
    """K4: versions restart at 1 with a producer; its frames never resolve to the one before it."""
    cache = MetadataCache()
    cache.on_epoch(5)
    for message in (source_of(5), meta_of(("k", "text/plain", b"old"))):
        cache.on_message(message, 1)
    cache.on_epoch(6)
    assert attributes(cache) is None
    cache.on_message(source_of(6), session)
    assert attributes(cache) is attributes(cache, None) is None
    cache.on_message(meta_of(("k", "text/plain", b"new")), session)
    assert (attributes(cache), attributes(cache, None), attributes(cache, 1, 5)) == (
        {"k": "new"},
        {"k": "new"},
        {"k": "old"},
    )


def test_metadata_that_comes_before_the_epoch_is_mapped_are_there_when_it_is() -> None:
    """The metadata stream may be faster than the announce; the epoch before keeps its own."""
    cache = MetadataCache()
    cache.on_epoch(5)
    for session, epoch, value in ((1, 5, b"old"), (2, 6, b"new")):
        cache.on_message(source_of(epoch), session)
        cache.on_message(meta_of(("k", "text/plain", value)), session)
    assert attributes(cache) == {"k": "old"}
    cache.on_epoch(6)
    assert attributes(cache) == {"k": "new"}


def test_a_session_that_names_its_epoch_later_named_it_for_all_that_it_said() -> None:
    """A producer that sends its metadata first; until then they belong to what is mapped."""
    cache = MetadataCache()
    cache.on_epoch(5)
    cache.on_message(meta_of(("k", "text/plain", b"1")), 1)
    assert attributes(cache) == {"k": "1"}
    cache.on_message(source_of(6), 1)
    assert attributes(cache) is None
    assert attributes(cache, 1, 6) == {"k": "1"}


def test_what_was_said_without_an_epoch_ends_with_the_mapped_one() -> None:
    """A producer that never announces itself cannot be distinguished from the one before: its next message counts."""
    cache = MetadataCache()
    cache.on_epoch(5)
    cache.on_message(meta_of(("k", "text/plain", b"1")), 1)
    cache.on_epoch(6)
    assert attributes(cache) is None
    cache.on_message(meta_of(("k", "text/plain", b"2")), 1)
    assert attributes(cache) == {"k": "2"}


def test_the_current_version_is_the_announced_one() -> None:
    """Older ones that are repeated for late joiners do not become current."""
    cache = MetadataCache()
    cache.on_epoch(5)
    for message in (meta_of(("k", "text/plain", b"1")), meta_of(("k", "text/plain", b"2"), version=2)):
        cache.on_message(source_of(5, message.meta_version), 1)
        cache.on_message(message, 1)
    cache.on_message(meta_of(("k", "text/plain", b"1"), timestamp_ns=99), 1)
    assert attributes(cache, None) == {"k": "2"}


def test_blobs_belong_to_an_epoch_too() -> None:
    """The same version and type in the next epoch is another table."""
    cache = MetadataCache()
    for epoch, data in ((5, b"old"), (6, b"new")):
        cache.on_message(source_of(epoch), 1)
        for message in blob_messages(STREAM, 1, 7, data):
            cache.on_message(message, 1)
    cache.on_epoch(6)
    assert (cache.blob(7), cache.blob(7, 1), cache.blob(7, epoch=5)) == (b"new", b"new", b"old")
    cache.on_epoch(7)
    assert cache.blob(7) is None


def test_only_so_many_sessions_are_remembered() -> None:
    """A sender under ever new sessions fills no memory."""
    cache = MetadataCache()
    for session in range(3 * MAX_KEPT):
        cache.on_message(source_of(session + 1), session)
        cache.on_message(meta_of(("k", "text/plain", b"1")), session)
    assert len(cache._sources) == len(cache._versions) == MAX_KEPT


def test_other_messages_change_nothing() -> None:
    """Announces of the source itself are not metadata."""
    cache = cached(DataSourceAnnounce(stream_id=STREAM, producer_id=1, epoch=1, meta_version=4))
    assert cache.get() is None


# --- blobs


def blob(data: bytes, *, version: int = 1, blob_type: int = 7, checksum: bool = True) -> list[Message]:
    return list(blob_messages(STREAM, version, blob_type, data, checksum=checksum))


@pytest.mark.spec("WIRE-10.3.3-01", "WIRE-15.9-01", "WIRE-15.9-02")
@pytest.mark.parametrize("length", [0, 1, CHUNK_MAX - 1, CHUNK_MAX, CHUNK_MAX + 1, 3 * CHUNK_MAX])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_blob_is_cut_and_put_together_again(length: int, checksum: bool) -> None:
    """In chunks of at most 64 KiB that cover it in order, with the CRC32C of the whole or none."""
    data = bytes(number * 7 & 0xFF for number in range(length))
    messages = blob(data, checksum=checksum)
    announce, *chunks, complete = messages
    assert isinstance(announce, MetaBlobAnnounce)
    assert isinstance(complete, MetaBlobComplete)
    assert announce.total_len == length
    assert announce.checksum == complete.checksum == (google_crc32c.value(data) if checksum else 0)
    offset = 0
    for chunk in chunks:
        assert isinstance(chunk, MetaBlobChunk)
        assert chunk.chunk_offset == offset
        assert 0 < len(chunk.chunk_bytes) <= CHUNK_MAX
        offset += len(chunk.chunk_bytes)
    assert offset == length
    cache = cached(*(decode(message.encode()) for message in messages))
    assert cache.blob(7) == cache.blob(7, 1) == data
    assert cache.blob(8) is cache.blob(7, 2) is None
    assert cache.blobs_discarded == 0


THREE = blob(bytes(range(256)) * (3 * CHUNK_MAX // 256))


def changed(index: int, **fields: Any) -> list[Message]:
    messages = list(THREE)
    messages[index] = msgspec.structs.replace(messages[index], **fields)
    return messages


FLAWED: dict[str, list[Message]] = {
    "a gap": [THREE[0], THREE[1], THREE[3], THREE[4]],
    "the first chunk missing": [THREE[0], *THREE[2:]],
    "the last chunk missing": [*THREE[:3], THREE[4]],
    "a chunk twice": [*THREE[:2], THREE[1], *THREE[2:]],
    "chunks exchanged": [THREE[0], THREE[2], THREE[1], *THREE[3:]],
    "an overlap": changed(2, chunk_offset=CHUNK_MAX - 1),
    "a step too far": changed(2, chunk_offset=CHUNK_MAX + 1),
    "an empty chunk": [*THREE[:2], msgspec.structs.replace(THREE[2], chunk_bytes=b""), *THREE[2:]],
    "too much": changed(0, total_len=3 * CHUNK_MAX - 1),
    "too little": changed(0, total_len=3 * CHUNK_MAX + 1),
    "another byte": changed(2, chunk_bytes=bytes(CHUNK_MAX)),
    "a wrong checksum": [changed(0, checksum=1)[0], *THREE[1:4], changed(4, checksum=1)[4]],
    "two checksums": changed(4, checksum=0),
    "no chunk at all": [THREE[0], THREE[4]],
}


@pytest.mark.spec("WIRE-10.3.3-02")
@pytest.mark.parametrize("messages", FLAWED.values(), ids=FLAWED.keys())
def test_a_blob_with_a_flaw_is_discarded_and_counted(messages: list[Message]) -> None:
    """Once; the next that comes whole is kept."""
    cache = cached(*messages)
    assert cache.blob(7) is None
    assert cache.blobs_discarded == 1
    for message in THREE:
        cache.on_message(message)
    assert cache.blob(7) == bytes(range(256)) * (3 * CHUNK_MAX // 256)
    assert cache.blobs_discarded == 1


def test_without_a_checksum_the_lengths_decide() -> None:
    """I5: 0 is none, not a value to compare with."""
    messages = [msgspec.structs.replace(message, checksum=0) for message in (THREE[0], THREE[4])]
    cache = cached(messages[0], *THREE[1:4], messages[1])
    assert cache.blob(7) is not None


def test_parts_without_a_beginning_are_ignored() -> None:
    """A consumer that came in the middle waits for the next time; that is no flaw."""
    cache = cached(*THREE[1:])
    assert cache.blob(7) is None
    assert cache.blobs_discarded == 0


def test_a_blob_larger_than_the_limit_is_not_begun() -> None:
    """Counted; its chunks are passed over."""
    announce, chunk, *_ = blob(b"x")
    cache = cached(msgspec.structs.replace(announce, total_len=MAX_BLOB_BYTES + 1), chunk)
    assert cache.blobs_discarded == 1
    assert cache._assemblies == {}


def test_blobs_of_several_versions_are_put_together_side_by_side() -> None:
    """Their chunks may come in turns."""
    one, two = blob(b"1" * 2 * CHUNK_MAX, version=1), blob(b"2" * 2 * CHUNK_MAX, version=2)
    cache = cached(*(message for pair in zip(one, two, strict=True) for message in pair))
    assert cache.blob(7, 1) == b"1" * 2 * CHUNK_MAX
    assert cache.blob(7, 2) == cache.blob(7) == b"2" * 2 * CHUNK_MAX


def test_blobs_of_several_types_belong_to_one_version() -> None:
    """One after the other."""
    cache = cached(*blob(b"flat", blob_type=1), *blob(b"mask", blob_type=2))
    assert (cache.blob(1), cache.blob(2), cache.blob(1, 1)) == (b"flat", b"mask", b"flat")


def test_a_blob_that_is_sent_again_is_kept_as_it_is() -> None:
    """Producers repeat theirs for consumers that come later."""
    cache = cached(*blob(b"flat"))
    before = cache.blob(7)
    for message in blob(b"flat"):
        cache.on_message(message)
    assert cache.blob(7) is before
    assert cache.blobs_discarded == 0


@pytest.mark.parametrize("checksum", [True, False])
def test_another_blob_under_the_same_version_replaces_the_first(checksum: bool) -> None:
    """A restarted producer counts its versions from 1 again; its table is the one that applies."""
    cache = cached(*blob(b"first", checksum=checksum), *blob(b"later", version=2))
    for message in blob(b"other", checksum=checksum):
        cache.on_message(message)
    assert cache.blob(7) == cache.blob(7, 1) == b"other"
    assert cache.blob(7, 2) == b"later"


def test_only_so_many_blobs_are_kept() -> None:
    """The oldest goes."""
    cache = MetadataCache()
    for version in range(MAX_KEPT + 1):
        for message in blob(b"%d" % version, version=version):
            cache.on_message(message)
    assert cache.blob(7, 0) is None
    assert cache.blob(7, 1) == b"1"
    assert cache.blob(7) == b"%d" % MAX_KEPT


def test_only_so_many_blobs_are_begun() -> None:
    """Announces without chunks take no room for ever."""
    cache = cached(*(blob(b"x", version=version)[0] for version in range(3 * MAX_KEPT)))
    assert len(cache._assemblies) <= MAX_KEPT
