# SPDX-License-Identifier: Apache-2.0
"""The directory: what is taken, for how long it is kept, and what is found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.discovery import directory as module
from tensorpool.discovery.config import AclRule
from tensorpool.discovery.directory import Directory
from tensorpool.wire.control import Attribute, DataSourceMeta, PayloadPool
from tensorpool.wire.discovery import DiscoveryStatus
from tests.discovery.conftest import EXPIRY_NS, announce, described, identity, named, read, request

ROOM = 1 << 19


@pytest.fixture
def directory() -> Directory:
    return Directory([identity("a"), identity("b")])


def found(directory: Directory, now_ns: int = 0, *tags: str, **filters: Any) -> list[tuple[str, int]]:
    results = directory.find(request(*tags, **filters), now_ns)
    return [(result.driver_instance_id, result.stream_id) for result in results]


def test_streams_of_one_id_at_two_drivers_are_two(directory: Directory) -> None:
    """The key is (driver_instance_id, stream_id)."""
    directory.on_pool_announce("b", announce(7), 0)
    directory.on_pool_announce("a", announce(7, epoch=5), 0)
    directory.on_pool_announce("a", announce(3), 0)
    assert found(directory) == [("a", 3), ("a", 7), ("b", 7)]
    assert len(directory) == 3


def test_a_result_says_all_that_was_announced_and_configured(directory: Directory) -> None:
    """Every field of the announce, the driver's endpoint, and the constants."""
    pools = tuple(PayloadPool(pool_id=id, pool_nslots=8, stride_bytes=64 << id, region_uri=f"u{id}") for id in (1, 4))
    given = announce(7, epoch=9, producer_id=5, layout_version=2, payload_pools=pools)
    directory.on_pool_announce("a", given, 0)
    (result,) = directory.find(request(), 0)
    assert (result.epoch, result.producer_id, result.layout_version) == (9, 5, 2)
    assert (result.header_slot_bytes, result.max_dims, result.header_nslots) == (256, 8, 8)
    assert [msgspec.structs.asdict(pool) for pool in result.payload_pools] == [
        msgspec.structs.asdict(pool) for pool in pools
    ]
    assert (result.driver_control_channel, result.driver_control_stream_id) == (identity().control.channel, 1000)
    assert (result.data_source_name, result.tags, result.data_source_id) == ("", (), None)


def test_an_entry_lives_for_its_drivers_expiry_after_each_announce() -> None:
    """To the nanosecond; drivers may have different ones."""
    directory = Directory([identity("a"), identity("b", 10)])
    directory.on_pool_announce("a", announce(), 0)
    directory.on_pool_announce("b", announce(), 0)
    assert found(directory, 9) == [("a", 7), ("b", 7)]
    assert found(directory, 10) == [("a", 7)]
    directory.on_pool_announce("a", announce(), 100)
    assert found(directory, 100 + EXPIRY_NS - 1) == [("a", 7)]
    assert found(directory, 100 + EXPIRY_NS) == []
    assert len(directory) == 0
    assert directory.counts["streams_expired"] == 2


def test_a_repeat_keeps_an_entry_and_makes_none(directory: Directory) -> None:
    """It counts as an announce of what is known."""
    assert not directory.on_repeat("a", 7, 0)
    directory.on_pool_announce("a", announce(), 0)
    assert directory.on_repeat("a", 7, EXPIRY_NS - 1)
    assert found(directory, 2 * EXPIRY_NS - 2) == [("a", 7)]
    assert not directory.on_repeat("a", 7, 2 * EXPIRY_NS - 1)


def test_a_later_epoch_replaces_and_an_earlier_one_waits_for_the_expiry(directory: Directory) -> None:
    """F8: after the expiry anything is taken."""
    directory.on_pool_announce("a", announce(epoch=5), 0)
    assert directory.on_pool_announce("a", announce(epoch=6), 1)
    assert not directory.on_pool_announce("a", announce(epoch=5), 2)
    assert directory.counts["announces_of_earlier_epochs"] == 1
    assert directory.find(request(), EXPIRY_NS)[0].epoch == 6
    assert found(directory, EXPIRY_NS + 1) == []  # the regression did not keep it alive
    assert directory.on_pool_announce("a", announce(epoch=2), EXPIRY_NS + 1)
    assert directory.find(request(), EXPIRY_NS + 1)[0].epoch == 2


def test_a_change_within_an_epoch_is_seen(directory: Directory) -> None:
    """Such as the producer's."""
    directory.on_pool_announce("a", announce(producer_id=1), 0)
    directory.on_pool_announce("a", announce(producer_id=2), 1)
    assert found(directory, 1, producer_id=1) == []
    assert found(directory, 1, producer_id=2) == [("a", 7)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stream_id": 0}, "without_a_stream_id"),
        ({"stream_id": 2**32 - 1}, "without_a_stream_id"),
        ({"epoch": 0}, "without_an_epoch"),
        ({"epoch": 2**64 - 1}, "without_an_epoch"),
        ({"header_slot_bytes": 128}, "of_unusable_rings"),
        ({"header_nslots": 12}, "of_unusable_rings"),
        ({"header_nslots": 0}, "of_unusable_rings"),
        ({"header_nslots": 16}, "of_unusable_rings"),
        ({"payload_pools": ()}, "of_unusable_rings"),
        ({"payload_pools": announce().payload_pools * 2}, "of_unusable_rings"),
        ({"header_region_uri": ""}, "of_unusable_uris"),
        ({"header_region_uri": "caf\xe9"}, "of_unusable_uris"),
    ],
)
def test_an_announce_that_no_client_could_attach_to_is_counted_and_ignored(
    directory: Directory, changed: dict[str, Any], reason: str
) -> None:
    """Each flaw under its name; a good entry stays as it was."""
    directory.on_pool_announce("a", announce(), 0)
    bad = msgspec.structs.replace(announce(), **changed)
    assert not directory.on_pool_announce("a", bad, 1)
    assert directory.counts == {f"announces_{reason}": 1}
    assert found(directory, 1) == [("a", 7)]


def test_metadata_may_come_before_the_announce(directory: Directory) -> None:
    """It waits for as long as an entry would, and makes none itself."""
    directory.on_data_source_announce("a", named(7, "camera"), 0)
    directory.on_data_source_meta("a", described(7, tags="x,y", data_source_id="42"), 1)
    assert found(directory, 1) == []
    directory.on_pool_announce("a", announce(), 2)
    (result,) = directory.find(request(data_source_name="camera"), 2)
    assert [tag.tag for tag in result.tags] == ["x", "y"]
    assert result.data_source_id == 42
    directory.on_data_source_announce("a", named(8, "late"), 0)
    directory.on_pool_announce("a", announce(8), EXPIRY_NS)
    assert found(directory, EXPIRY_NS, data_source_name="late") == []


def test_names_and_tags_go_with_the_producer_that_gave_them(directory: Directory) -> None:
    """A later epoch forgets what was said of earlier ones, and nothing that was said of itself before it came."""
    directory.on_pool_announce("a", announce(epoch=1), 0)
    directory.on_data_source_announce("a", named(7, "old", 1), 0)
    directory.on_data_source_meta("a", described(7, tags="old"), 0)
    directory.on_pool_announce("a", announce(epoch=2), 1)
    (result,) = directory.find(request(), 1)
    assert (result.data_source_name, result.tags) == ("", ())
    assert not directory.on_data_source_announce("a", named(7, "old", 1), 2)
    directory.on_data_source_announce("a", named(7, "new", 3), 3)
    directory.on_data_source_meta("a", described(7, tags="new"), 3)
    directory.on_pool_announce("a", announce(epoch=3), 4)
    assert found(directory, 4, "new", data_source_name="new") == [("a", 7)]


def test_an_announce_without_a_name_takes_none_away(directory: Directory) -> None:
    """And a name that is too long gives none: 256 bytes cannot hold it."""
    directory.on_pool_announce("a", announce(), 0)
    directory.on_data_source_announce("a", named(7, "n" * 256), 0)
    directory.on_data_source_announce("a", named(7, ""), 0)
    assert not directory.on_data_source_announce("a", named(7, "n" * 257), 0)
    assert found(directory, 0, data_source_name="n" * 256) == [("a", 7)]
    assert directory.counts["names_too_long"] == 1


@pytest.mark.parametrize(
    ("format", "value", "tags"),
    [
        ("text/plain", b"a, b ,,a", ["a", "b"]),
        ("application/json", b'["a,b", "c", 5, ""]', ["a,b", "c"]),
        ("application/json", b'{"a": 1}', []),
        ("application/json", b"[", []),
        ("text/plain", b"\xff", []),
        ("text/plain", "é,b".encode(), ["b"]),
        ("application/octet-stream", b"a", []),
        ("text/plain", b"x" * 5000, []),
        ("text/plain", ("y" * 2000 + "," + "z" * 3000).encode(), []),
    ],
)
def test_tags_are_text_with_commas_or_a_json_array(
    directory: Directory, format: str, value: bytes, tags: list[str]
) -> None:
    """F5; what is neither, or longer than answers can carry, is none."""
    directory.on_pool_announce("a", announce(), 0)
    attribute = Attribute(key="tags", format=format, value=value)
    directory.on_data_source_meta(
        "a", DataSourceMeta(stream_id=7, meta_version=1, timestamp_ns=0, attributes=(attribute,)), 0
    )
    (result,) = directory.find(request(), 0)
    assert [tag.tag for tag in result.tags] == tags


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("18446744073709551614", 2**64 - 2), ("-1", None), ("x", None)])
def test_a_data_source_id_is_decimal_text(directory: Directory, text: str, number: int | None) -> None:
    """F5; null is not a value."""
    directory.on_pool_announce("a", announce(), 0)
    directory.on_data_source_meta("a", described(7, data_source_id=text), 0)
    assert directory.find(request(), 0)[0].data_source_id == number


def test_filters_are_combined_with_and(directory: Directory) -> None:
    """Each alone, all together, and each that fails."""
    directory.on_pool_announce("a", announce(7, producer_id=3), 0)
    directory.on_pool_announce("a", announce(8, producer_id=0), 0)
    directory.on_data_source_announce("a", named(7, "Cam"), 0)
    directory.on_data_source_meta("a", described(7, tags="x,y", data_source_id="5"), 0)
    whole = {"stream_id": 7, "producer_id": 3, "data_source_id": 5, "data_source_name": "Cam"}
    assert found(directory, 0, "x", "y", "x", **whole) == [("a", 7)]
    for key, value in whole.items():
        assert found(directory, 0, **{key: value}) == [("a", 7)]
        wrong = "cam" if key == "data_source_name" else 99
        assert found(directory, 0, "x", **whole | {key: wrong}) == []
    assert found(directory, 0, "X") == found(directory, 0, "x", "z") == []
    assert found(directory, 0, producer_id=0) == [("a", 8)]  # F12
    assert found(directory, 0, stream_id=0) == []


def test_a_name_is_repeated_byte_for_byte(directory: Directory) -> None:
    """Also one that is no text."""
    name = b"caf\xe9 \xff\x00".decode("utf-8", "surrogateescape")
    directory.on_pool_announce("a", announce(), 0)
    directory.on_data_source_announce("a", named(7, name), 0)
    response = read(directory.answer(request(data_source_name=name), 0, ROOM))
    assert response.results[0].data_source_name.encode("utf-8", "surrogateescape") == b"caf\xe9 \xff\x00"


def test_more_than_the_limit_is_an_error_with_the_number() -> None:
    """Never a part of the answer."""
    directory = Directory([identity()], max_results=3)
    for stream_id in range(1, 5):
        directory.on_pool_announce("a", announce(stream_id), 0)
    response = read(directory.answer(request(request_id=9), 0, ROOM))
    assert (response.status, response.results, response.request_id) == (DiscoveryStatus.ERROR, (), 9)
    assert "4 streams match, at most 3" in response.error_message
    assert len(read(directory.answer(request(stream_id=1), 0, ROOM)).results) == 1


def test_an_answer_that_does_not_fit_is_an_error(directory: Directory) -> None:
    """To the byte."""
    for stream_id in range(1, 10):
        directory.on_pool_announce("a", announce(stream_id), 0)
    data = directory.answer(request(), 0, ROOM)
    assert directory.answer(request(), 0, len(data)) == data
    response = read(directory.answer(request(), 0, len(data) - 1))
    assert (response.status, response.results) == (DiscoveryStatus.ERROR, ())
    assert f"take {len(data)} bytes" in response.error_message
    assert len(response.error_message) <= 1024


def test_nothing_found_is_ok_without_an_acl_and_not_found_with_one(directory: Directory) -> None:
    """F1."""
    assert read(directory.answer(request(), 0, ROOM)).status is DiscoveryStatus.OK
    guarded = Directory([identity()], rules=())
    guarded.on_pool_announce("a", announce(), 0)
    for asked in (request(), request(stream_id=7), request(stream_id=8)):
        response = read(guarded.answer(asked, 0, ROOM))
        assert (response.status, response.results) == (DiscoveryStatus.NOT_FOUND, ())


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        (AclRule(), [1, 2]),
        (AclRule(client_ids=(1,)), [1, 2]),
        (AclRule(client_ids=(2,)), []),
        (AclRule(stream_ids=(2,)), [2]),
        (AclRule(driver_instance_ids=("b",)), []),
        (AclRule(names=("cam/*", "zzz")), [1]),
        (AclRule(names=("CAM/*",)), []),
        (AclRule(tags=("x",)), [1]),
        (AclRule(tags=("x", "y")), []),
        (AclRule(names=("cam/*",), stream_ids=(2,)), []),
    ],
)
def test_a_rule_shows_what_fits_every_list(rule: AclRule, seen: list[int]) -> None:
    """To the clients it names; what it does not show does not exist."""
    directory = Directory([identity()], rules=(rule,))
    for stream_id in (1, 2):
        directory.on_pool_announce("a", announce(stream_id), 0)
    directory.on_data_source_announce("a", named(1, "cam/front"), 0)
    directory.on_data_source_meta("a", described(1, tags="x"), 0)
    assert [stream_id for _, stream_id in found(directory)] == seen


def test_there_are_only_so_many_streams() -> None:
    """Those that are known stay; further ones and their descriptions are counted."""
    directory = Directory([identity()], max_streams=2)
    assert [directory.on_pool_announce("a", announce(stream_id), 0) for stream_id in (1, 2, 3)] == [True, True, False]
    assert not directory.on_data_source_announce("a", named(9, "x"), 0)
    assert directory.on_pool_announce("a", announce(1, epoch=2), 1)
    assert directory.counts["streams_beyond_max_streams"] == 2
    assert directory.on_pool_announce("a", announce(3), EXPIRY_NS)


@pytest.mark.spec("DISC-5.2-19")
def test_words_of_an_error_are_limited() -> None:
    """1024 bytes, cut between letters."""
    response = read(module.refusal(1, "é" * 1000))
    assert response.error_message == "é" * 512


def test_a_stream_goes_by_its_configured_name_until_a_producer_names_it() -> None:
    """And again when the producer's epoch is past."""
    directory = Directory([msgspec.structs.replace(identity(), names={7: "volume"})])
    directory.on_pool_announce("a", announce(7, epoch=1), 0)
    directory.on_pool_announce("a", announce(8, epoch=1), 0)
    assert [found.stream_id for found in directory.find(request(data_source_name="volume"), 0)] == [7]
    directory.on_data_source_announce("a", named(7, "camera", epoch=1), 0)
    assert directory.find(request(data_source_name="volume"), 0) == []
    assert [found.stream_id for found in directory.find(request(data_source_name="camera"), 0)] == [7]
    directory.on_pool_announce("a", announce(7, epoch=2), 0)
    assert directory.name_of("a", 7) == "volume"
