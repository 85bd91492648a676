# SPDX-License-Identifier: Apache-2.0
"""Which stream is meant: by id, by name, of one driver; and what is said where it is none or several."""

from __future__ import annotations

import pytest

from tensorpool.client.discovery_query import DiscoveredStream
from tensorpool.diagnosis.streams import MAX_LISTED, Wanted
from tensorpool.errors import LocalProtocolError, TensorPoolError


def stream(stream_id: int, name: str | None = None, driver: str = "a") -> DiscoveredStream:
    return DiscoveredStream(
        driver_instance_id=driver,
        stream_id=stream_id,
        data_source_name=name,
        tags=(),
        data_source_id=None,
        producer_id=0,
        epoch=1,
        layout_version=1,
        header_nslots=4,
        header_slot_bytes=256,
        max_dims=8,
        header_region_uri="shm:file?path=/dev/shm/x",
        payload_pools=(),
        driver_control_channel="aeron:ipc",
        driver_control_stream_id=1000,
    )


STREAMS = [stream(7, "camera/front"), stream(8, "camera/rear"), stream(9), stream(7, "lidar", "b")]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (Wanted("camera/rear"), 1),
        (Wanted("9"), 2),
        (Wanted("7", "b"), 3),
        (Wanted("lidar"), 3),
        (Wanted("camera"), None),
    ],
)
def test_an_id_or_a_name_chooses_one(wanted: Wanted, index: int | None) -> None:
    """Names letter by letter; an id by its number."""
    assert wanted.choose(STREAMS) is (None if index is None else STREAMS[index])


def test_several_are_listed_with_what_tells_them_apart() -> None:
    """By driver where there are several drivers, else by id."""
    with pytest.raises(TensorPoolError) as caught:
        Wanted("7").choose(STREAMS)
    assert str(caught.value) == (
        "'7' is ambiguous: camera/front (7 of a), lidar (7 of b); choose with --driver INSTANCE"
    )
    with pytest.raises(TensorPoolError, match=r"'twice' is ambiguous: twice \(1 of a\), twice \(2 of a\); give one"):
        Wanted("twice").choose([stream(1, "twice"), stream(2, "twice")])


def test_an_unknown_one_is_answered_with_what_there_is() -> None:
    """The most alike first, then all, up to a limit; and what to do where there is nothing."""
    said = str(Wanted("camera/frond").unknown(STREAMS, "as discovery says"))
    assert said.startswith(
        "there is no stream 'camera/frond' (as discovery says); did you mean camera/front or camera/"
    )
    assert said.endswith("there are: camera/front (7 of a), camera/rear (8 of a), (no name) (9 of a), lidar (7 of b)")
    assert "did you mean" not in str(Wanted("xyz").unknown(STREAMS, "as discovery says"))
    many = [stream(number, f"s{number}") for number in range(1, MAX_LISTED + 6)]
    assert str(Wanted("xyz").unknown(many, "asked")).endswith("s20 (20 of a) and 5 more (`tensorpool ls`)")
    assert str(Wanted("xyz").unknown([], "no provider answers")) == (
        "there is no stream 'xyz', nor any other (no provider answers); start a producer, or name another driver with "
        "--aeron-dir or --config"
    )


@pytest.mark.parametrize("text", ["0", "4294967295", "", "x" * 257])
def test_what_no_stream_can_be_called_is_refused(text: str) -> None:
    """Ids that are reserved, and names that no announce can carry."""
    with pytest.raises(LocalProtocolError):
        Wanted(text)
