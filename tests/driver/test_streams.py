# SPDX-License-Identifier: Apache-2.0
"""Streams: those of the configuration are there, others are made within their ids and limits."""

from __future__ import annotations

import msgspec
import pytest

from tensorpool.control.provisioning import ProvisionRequest
from tensorpool.driver.streams import IdPool, NoStream, Stream, StreamTable
from tensorpool.settings import Range
from tensorpool.shm.layout import PoolSpec, RingSpec
from tests.driver.conftest import DYNAMIC, FRONT, REAR, RING, driver_config


@pytest.fixture
def table() -> StreamTable:
    return StreamTable(driver_config())


def test_the_configured_streams_exist_with_the_ring_of_their_profile() -> None:
    """Each by its own profile, with its name, and without memory yet."""
    config = driver_config(
        {
            "profiles.large": {"header_nslots": 8, "payload_pools": [{"pool_id": 7, "stride_bytes": 4096}]},
            "streams.rear.profile": "large",
        }
    )
    table = StreamTable(config)
    assert [(stream.stream_id, stream.name, stream.ring) for stream in table] == [
        (FRONT, "front", RING),
        (REAR, "rear", config.profiles["large"].ring),
    ]
    assert all(stream.current is None and stream.producer is None and not stream.is_dynamic for stream in table)


def test_a_created_stream_has_the_default_profile() -> None:
    """Whichever profile the configuration calls so, not simply the first."""
    small = {"header_nslots": 2, "payload_pools": [{"pool_id": 9, "stride_bytes": 64}]}
    config = driver_config({"profiles.small": small, "policies.default_profile": "small"})
    stream = StreamTable(config).create(DYNAMIC[1])
    assert stream.ring == config.profiles["small"].ring
    assert stream.is_dynamic


@pytest.mark.spec("DRV-11-01")
def test_id_zero_takes_the_lowest_free_id(table: StreamTable) -> None:
    """Gaps are filled: an id that was taken by name is passed over, one that was forgotten comes first again."""
    assert table.create(DYNAMIC[1]).stream_id == DYNAMIC[1]
    assert [table.create(0).stream_id, table.create(0).stream_id] == [DYNAMIC[0], DYNAMIC[2]]
    table.forget(DYNAMIC[1])
    assert table.get(DYNAMIC[1]) is None
    assert table.create(0).stream_id == DYNAMIC[1]


# --- rings that clients ask for


def asked(stream_id: int = DYNAMIC[0], slots: int = 9, frame_bytes: int = 1000) -> ProvisionRequest:
    return ProvisionRequest(stream_id=stream_id, slots=slots, frame_bytes=frame_bytes)


def free(stream: Stream) -> bool:
    """That no stream has a producer."""
    return False


def test_a_stream_is_provisioned_with_the_next_powers_of_two(table: StreamTable) -> None:
    """Slots and stride hold what was asked for; the lowest id where the driver may choose; a header ring, one pool."""
    stream = table.provision(asked(), free)
    assert (stream.stream_id, stream.is_dynamic, stream.is_provisioned) == (DYNAMIC[0], True, True)
    assert stream.ring == RingSpec(16, (PoolSpec(1, 1024),))
    assert table.provision(asked(0, 1, 1), free).stream_id == DYNAMIC[1]
    assert table.provision(asked(0, 1, 1), free).ring == RingSpec(1, (PoolSpec(1, 64),))


def test_a_ring_that_fits_is_used_as_it_is(table: StreamTable) -> None:
    """A configured one, one that a producer writes, and one that holds more than is asked for."""
    assert table.provision(asked(FRONT, RING.nslots, 128), lambda stream: True).ring == RING
    ring = table.provision(asked(), free).ring
    assert table.provision(asked(slots=16, frame_bytes=1024), lambda stream: True).ring is ring
    assert table.provision(asked(slots=2, frame_bytes=8), free).ring is ring


@pytest.mark.parametrize(("slots", "frame_bytes"), [(17, 1000), (9, 1025)])
def test_a_ring_that_does_not_fit_is_replaced_where_no_producer_writes_it(
    table: StreamTable, slots: int, frame_bytes: int
) -> None:
    """Of streams that clients made; otherwise the refusal says what there is and what was asked for."""
    before = table.provision(asked(), free).ring
    wanted = asked(slots=slots, frame_bytes=frame_bytes)
    words = f"has 16 slots of up to 1024 bytes, less than the {slots} slots of {frame_bytes} bytes asked for"
    with pytest.raises(NoStream, match=f"{words}, and a producer; close that one first"):
        table.provision(wanted, lambda stream: True)
    assert table.provision(asked(), free).ring is before
    assert table.provision(wanted, free).ring == wanted.ring
    with pytest.raises(NoStream, match=r"it is configured: give \[streams.front\] a larger profile"):
        table.provision(asked(FRONT, slots, frame_bytes), free)
    assert [stream.ring for stream in table if not stream.is_dynamic] == [RING, RING]


def test_only_what_clients_may_create_is_provisioned(table: StreamTable) -> None:
    """Ids of the range, within the number of streams, where policies allow it; a refusal leaves nothing behind."""
    for config, stream_id, words in (
        (driver_config(), 5, "outside driver.stream_id_range"),
        (driver_config({"policies.allow_dynamic_streams": False}), DYNAMIC[0], "allow_dynamic_streams is false"),
        (driver_config({"policies.max_streams": 2}), DYNAMIC[0], "max_streams"),
    ):
        refusing = StreamTable(config)
        with pytest.raises(NoStream, match=words):
            refusing.provision(asked(stream_id), free)
        assert len(refusing) == 2


def test_rings_stay_within_the_budget() -> None:
    """Each within its limit, and all with the epochs that are kept; a stream that is forgotten makes room."""
    size = asked().ring.size_bytes
    one = StreamTable(driver_config({"policies.max_provisioned_stream_bytes": size}))
    assert one.provision(asked(), free).ring == asked().ring
    with pytest.raises(NoStream, match=f"policies.max_provisioned_stream_bytes is {size}"):
        one.provision(asked(slots=17), free)
    limits = {"policies.max_provisioned_bytes": 4 * size, "policies.epoch_gc_keep": 2}
    table = StreamTable(driver_config(limits))
    table.create(DYNAMIC[2])  # with the default profile: not of this budget
    table.provision(asked(DYNAMIC[0]), free)
    table.provision(asked(DYNAMIC[1]), free)
    with pytest.raises(NoStream, match=f"in each of 2 epochs, .* take {4 * size} already; .* is {4 * size}"):
        table.provision(asked(DYNAMIC[2]), free)
    with pytest.raises(NoStream, match=f"take {2 * size} already"):
        table.provision(asked(DYNAMIC[1], slots=17), free)  # its own ring goes: it does not count
    table.forget(DYNAMIC[0])
    assert table.provision(asked(DYNAMIC[2]), free).ring == asked().ring
    none = StreamTable(driver_config({"policies.max_provisioned_stream_bytes": 0}))
    with pytest.raises(NoStream, match="max_provisioned_stream_bytes is 0"):
        none.provision(asked(slots=1, frame_bytes=1), free)


def test_forgetting_a_stream_that_is_not_there_does_nothing(table: StreamTable) -> None:
    """The outcome of a creation may come twice."""
    table.forget(DYNAMIC[0])
    assert len(table) == 2


@pytest.mark.spec("DRV-11-02")
@pytest.mark.parametrize("stream_id", [DYNAMIC[0] - 1, DYNAMIC[-1] + 1, 1, 2**32 - 2])
def test_an_id_outside_the_range_is_a_wrong_parameter(table: StreamTable, stream_id: int) -> None:
    """E14; the text names the id and the range."""
    with pytest.raises(NoStream, match=f"stream {stream_id} is outside driver.stream_id_range 20000-20002") as caught:
        table.create(stream_id)
    assert caught.value.invalid
    assert len(table) == 2


def test_an_exhausted_range_is_a_matter_of_state(table: StreamTable) -> None:
    """All ids taken: denied, not malformed."""
    for _ in DYNAMIC:
        table.create(0)
    with pytest.raises(NoStream, match="all stream ids of 20000-20002 are taken") as caught:
        table.create(0)
    assert not caught.value.invalid


@pytest.mark.spec("DRV-17-10")
@pytest.mark.parametrize("stream_id", [0, DYNAMIC[0], 77])
def test_without_dynamic_streams_no_id_can_be_created(stream_id: int) -> None:
    """Policy, whatever the id: also one that the range would refuse."""
    table = StreamTable(driver_config({"policies.allow_dynamic_streams": False}))
    with pytest.raises(NoStream, match=r"policies\.allow_dynamic_streams is false") as caught:
        table.create(stream_id)
    assert not caught.value.invalid


@pytest.mark.spec("DRV-11-03")
@pytest.mark.parametrize("stream_id", [0, 20000])
def test_an_empty_range_is_a_wrong_parameter(stream_id: int) -> None:
    """§11, for a configuration that came past its own checks."""
    config = driver_config()
    msgspec.structs.force_setattr(config.driver, "stream_id_range", Range())
    with pytest.raises(NoStream, match=r"driver\.stream_id_range is empty") as caught:
        StreamTable(config).create(stream_id)
    assert caught.value.invalid


@pytest.mark.parametrize("stream_id", [0, DYNAMIC[2]])
def test_there_are_at_most_max_streams_configured_ones_included(stream_id: int) -> None:
    """Two are configured, so one more is the third and last."""
    table = StreamTable(driver_config({"policies.max_streams": 3}))
    table.create(DYNAMIC[0])
    with pytest.raises(NoStream, match=r"there are already 3 streams \(policies\.max_streams\)") as caught:
        table.create(stream_id)
    assert not caught.value.invalid
    assert len(table) == 3


def test_a_table_may_change_while_it_is_walked(table: StreamTable) -> None:
    """A tick that forgets or makes a stream does not trip over itself."""
    for stream in table:
        table.forget(stream.stream_id)
        table.create(0)
    assert [stream.stream_id for stream in table] == list(DYNAMIC[:2])


# --- ids for consumers


def test_an_owner_keeps_its_id_until_it_gives_it_back() -> None:
    """However often it asks; then the id is free for the next."""
    pool = IdPool(Range(31000, 31001))
    assert [pool.lend((FRONT, 1)), pool.lend((FRONT, 2)), pool.lend((FRONT, 1))] == [31000, 31001, 31000]
    pool.give_back((FRONT, 1))
    assert pool.lend((REAR, 1)) == 31000
    assert len(pool) == 2


@pytest.mark.spec("DRV-11-07")
def test_an_exhausted_pool_lends_nothing() -> None:
    """None, without a trace of the one that asked in vain."""
    pool = IdPool(Range(31000, 31000))
    assert pool.lend((FRONT, 1)) == 31000
    assert pool.lend((FRONT, 2)) is None
    assert len(pool) == 1
    pool.give_back((FRONT, 2))
    pool.give_back((FRONT, 1))
    assert pool.lend((FRONT, 2)) == 31000


def test_the_empty_range_lends_nothing() -> None:
    """A range that is not configured is never allocated from."""
    assert IdPool(Range()).lend((FRONT, 1)) is None
