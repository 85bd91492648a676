# SPDX-License-Identifier: Apache-2.0
"""Which epoch a consumer has mapped: announce by announce, with time passed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.client.mapping import ACTIVE_PERIODS, Check, Effect, Map, MappingState, Unmap
from tensorpool.errors import RemoteProtocolError
from tensorpool.shm.announced import FRESH_PERIODS, Regions, has_epoch, is_fresh
from tensorpool.wire.control import ClockDomain
from tensorpool.wire.driver import LeaseRevokeReason
from tests.client.conftest import RING, SECOND_NS, STREAM, announced, granted, revoked

PERIOD_NS = SECOND_NS
WINDOW_NS = FRESH_PERIODS * PERIOD_NS
T0 = 1_000 * SECOND_NS
WALL = 10**18


def in_epoch(epoch: int) -> Any:
    return granted(1, epoch=epoch)


def mapped_in(epoch: int, now_ns: int = T0) -> MappingState:
    """A consumer that has mapped the epoch which the driver answered."""
    state = MappingState(PERIOD_NS)
    follow(state, state.on_attached(in_epoch(epoch), now_ns))
    assert state.epoch == epoch
    return state


def follow(state: MappingState, effects: list[Effect]) -> list[Effect]:
    """Do what is asked, successfully."""
    for effect in effects:
        if isinstance(effect, Map):
            state.on_mapped(effect.regions.epoch)
    return effects


def epochs_of(effects: list[Effect]) -> list[int]:
    return [effect.regions.epoch for effect in effects if isinstance(effect, Map)]


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


# --- freshness


@pytest.mark.spec("WIRE-10.1.1-09", "WIRE-10.1.1-11")
@pytest.mark.parametrize(
    ("age_ns", "is_accepted"),
    [(0, True), (WINDOW_NS, True), (WINDOW_NS + 1, False), (-WINDOW_NS, True), (-WINDOW_NS - 1, False)],
    ids=["now", "old", "too old", "ahead", "too far ahead"],
)
@pytest.mark.parametrize("domain", list(ClockDomain))
def test_an_announce_counts_within_the_window_around_now(domain: ClockDomain, age_ns: int, is_accepted: bool) -> None:
    """C15: in either clock domain, by that domain's clock; the future has a window too."""
    assert WINDOW_NS == 3 * PERIOD_NS
    now_ns = T0 if domain is ClockDomain.MONOTONIC else WALL
    announce = announced(1, announce_timestamp_ns=now_ns - age_ns, announce_clock_domain=domain)
    assert is_fresh(announce, 0, T0, WALL, PERIOD_NS) is is_accepted


@pytest.mark.spec("WIRE-10.1.1-12")
@pytest.mark.parametrize(("before_ns", "is_accepted"), [(1, False), (0, True), (-1, True)])
def test_a_monotonic_announce_from_before_the_join_does_not_count(before_ns: int, is_accepted: bool) -> None:
    """However fresh it is: Aeron may replay its log."""
    announce = announced(1, announce_timestamp_ns=T0 - before_ns)
    assert is_fresh(announce, T0, T0 + 1, WALL, PERIOD_NS) is is_accepted


@pytest.mark.spec("WIRE-10.1.1-13", "WIRE-10.1.1-14")
def test_the_join_time_says_nothing_about_a_wall_clock() -> None:
    """With REALTIME_SYNCED the window alone decides, whatever the join time is."""
    for joined_ns in (0, T0, WALL, WALL + WINDOW_NS):
        stamps = {"announce_clock_domain": ClockDomain.REALTIME_SYNCED}
        fresh = announced(1, announce_timestamp_ns=WALL - WINDOW_NS, **stamps)
        stale = announced(1, announce_timestamp_ns=WALL - WINDOW_NS - 1, **stamps)
        assert is_fresh(fresh, joined_ns, T0, WALL, PERIOD_NS)
        assert not is_fresh(stale, joined_ns, T0, WALL, PERIOD_NS)


def test_a_wall_clock_stamp_in_the_monotonic_domain_is_from_the_future() -> None:
    """And one of the monotonic clock in the other domain is from the past: neither is believed."""
    assert not is_fresh(announced(1, announce_timestamp_ns=WALL), 0, T0, WALL, PERIOD_NS)
    realtime = {"announce_clock_domain": ClockDomain.REALTIME_SYNCED}
    assert not is_fresh(announced(1, announce_timestamp_ns=T0, **realtime), 0, T0, WALL, PERIOD_NS)


@pytest.mark.spec("WIRE-15.14-06")
@pytest.mark.spec("WIRE-7.1-06", "WIRE-15.1-10")
@pytest.mark.parametrize("clock", ["monotonic", "wall"])
def test_activity_is_fresh_within_its_window_by_either_clock(clock: str) -> None:
    """C8: the clock is not declared; a stamp from the future counts as stale, as after a reboot."""
    assert 3 <= ACTIVE_PERIODS <= 5
    state = MappingState(PERIOD_NS)
    base_ns = T0 if clock == "monotonic" else WALL
    for age_ns, is_accepted in [
        (0, True),
        (ACTIVE_PERIODS * PERIOD_NS, True),
        (ACTIVE_PERIODS * PERIOD_NS + 1, False),
        (-WINDOW_NS, True),
        (-WINDOW_NS - 1, False),
    ]:
        assert state.is_activity_fresh(base_ns - age_ns, T0, WALL) is is_accepted


# --- layouts


def test_regions_are_taken_from_an_answer_and_from_an_announce_alike() -> None:
    """The ring's URI first, then the pools' in their order."""
    answer, announce = granted(1), announced(5)
    assert Regions.of(answer) == Regions.of(announce)
    regions = Regions.of(answer)
    assert (regions.stream_id, regions.epoch, regions.layout_version, regions.ring) == (STREAM, 5, 1, RING)
    assert regions.uris == (answer.header_region_uri, *(pool.region_uri for pool in answer.payload_pools))


ONE_POOL = announced(1).payload_pools[0]
BAD_LAYOUTS: dict[str, dict[str, Any]] = {
    "another layout": {"layout_version": 2},
    "layout 0": {"layout_version": 0},
    "no pools": {"payload_pools": ()},
    "3 slots": {"header_nslots": 3},
    "no slots": {"header_nslots": 0},
    "slots of 128": {"header_slot_bytes": 128},
    "a pool twice": {"payload_pools": (ONE_POOL, ONE_POOL)},
    "a pool with other slots": {"payload_pools": (msgspec.structs.replace(ONE_POOL, pool_nslots=8),)},
    "a stride of 96": {"payload_pools": (msgspec.structs.replace(ONE_POOL, stride_bytes=96),)},
    "a stride of 32": {"payload_pools": (msgspec.structs.replace(ONE_POOL, stride_bytes=32),)},
}


@pytest.mark.spec("WIRE-10.1.1-05", "WIRE-15.5-02", "WIRE-15.22-13")
@pytest.mark.parametrize("flaw", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_a_layout_that_no_stream_may_have_is_rejected_as_a_whole(flaw: dict[str, Any]) -> None:
    """C16: and what was mapped before is not touched by the attempt itself."""
    with pytest.raises(RemoteProtocolError):
        Regions.of(announced(6, **flaw))
    state = mapped_in(5)
    with pytest.raises(RemoteProtocolError):
        state.on_announce(announced(6, **flaw), T0, True)
    assert state.epoch == 5


@pytest.mark.parametrize("name", ["stream_id", "epoch", "layout_version", "header_nslots", "header_slot_bytes"])
def test_an_answer_without_a_field_has_no_layout(name: str) -> None:
    """Every one of them is needed."""
    with pytest.raises(RemoteProtocolError, match="missing"):
        Regions.of(granted(1, **{name: None}))


# --- mapping


@pytest.mark.spec("WIRE-15.21-05")
def test_the_drivers_answer_is_mapped() -> None:
    """C7: whatever its age; we asked for it just now."""
    state = MappingState(PERIOD_NS)
    assert state.epoch is None
    effects = state.on_attached(in_epoch(5), T0)
    assert effects == [Map(Regions.of(in_epoch(5)))]
    assert state.epoch is None
    state.on_mapped(5)
    assert state.epoch == 5


def test_without_a_lease_nothing_is_mapped() -> None:
    """DRV-2.3: an announce alone gives no right to memory."""
    state = MappingState(PERIOD_NS)
    assert state.on_announce(announced(5), T0, False) == []
    assert state.on_seq_went_back() == []
    assert state.on_stale() == []
    assert state.on_tick(T0) is False


@pytest.mark.spec("WIRE-15.21-06", "WIRE-15.1-08")
def test_an_announce_of_the_mapped_epoch_is_a_reason_to_look_again() -> None:
    """It stays mapped; the superblocks are compared once more, and whose epoch it is is learnt."""
    state = mapped_in(5)
    assert state.producer_id is None
    assert state.on_announce(announced(5, producer_id=9), T0, True) == [Check()]
    assert (state.epoch, state.producer_id) == (5, 9)


def _pool(index: int, **changed: Any) -> dict[str, Any]:
    pools = list(announced(5).payload_pools)
    pools[index] = msgspec.structs.replace(pools[index], **changed)
    return {"payload_pools": tuple(pools)}


ONE_MORE = msgspec.structs.replace(announced(5).payload_pools[0], pool_id=9, region_uri="shm:file?path=/dev/shm/tp/9")
OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "a stride": _pool(1, stride_bytes=4096),
    "a pool id": _pool(1, pool_id=3),
    "a pool's URI": _pool(0, region_uri="shm:file?path=/dev/shm/tp/elsewhere"),
    "the ring's URI": {"header_region_uri": "shm:file?path=/dev/shm/tp/elsewhere"},
    "a pool more": {"payload_pools": (*announced(5).payload_pools, ONE_MORE)},
    "a pool less": {"payload_pools": announced(5).payload_pools[:1]},
    "twice the slots": {
        "header_nslots": 2 * RING.nslots,
        "payload_pools": tuple(
            msgspec.structs.replace(pool, pool_nslots=2 * RING.nslots) for pool in announced(5).payload_pools
        ),
    },
}


@pytest.mark.spec("WIRE-15.1-02", "WIRE-15.1-04", "WIRE-15.1-06", "WIRE-15.1-07")
@pytest.mark.parametrize("changed", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS.keys())
def test_an_announce_of_the_mapped_epoch_that_describes_other_regions_remaps(changed: dict[str, Any]) -> None:
    """K2: what is mapped is let go, what is announced is mapped instead, and the mismatch is counted."""
    state = mapped_in(5)
    effects = follow(state, state.on_announce(announced(5, producer_id=9, **changed), T0 + 1, True))
    assert kinds(effects) == [Unmap, Map]
    assert effects[1] == Map(Regions.of(announced(5, **changed)))
    assert (state.epoch, state.producer_id, state.mismatches) == (5, 9, 1)
    assert kinds(follow(state, state.on_announce(announced(5), T0 + 2, True))) == [Unmap, Map]
    assert state.on_announce(announced(5), T0 + 3, True) == [Check()]
    assert state.mismatches == 2


@pytest.mark.spec("WIRE-15.1-01", "WIRE-15.1-03", "WIRE-15.1-07")
@pytest.mark.parametrize("changed", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_an_announce_of_the_mapped_epoch_that_nothing_can_match_unmaps(changed: dict[str, Any]) -> None:
    """Another layout version, slots of another size: RemoteProtocolError, and `on_rejected` unmaps."""
    state = mapped_in(5)
    with pytest.raises(RemoteProtocolError):
        state.on_announce(announced(5, **changed), T0 + 1, True)
    assert state.mismatches == 1
    assert kinds(state.on_rejected("layout_version: …")) == [Unmap]
    assert epochs_of(state.on_announce(announced(5), T0 + 2, False)) == [5]


def test_the_order_in_which_pools_are_announced_says_nothing() -> None:
    """The same pools the other way round are the same regions."""
    state = mapped_in(5)
    reordered = announced(5, payload_pools=announced(5).payload_pools[::-1])
    assert state.on_announce(reordered, T0 + 1, True) == [Check()]
    assert state.mismatches == 0


def test_a_default_that_is_spelt_out_is_no_difference() -> None:
    """Another producer may announce besides its driver, in its own words (decisions, part J)."""
    state = mapped_in(5)
    spelt_out = announced(5).header_region_uri + "|require_hugepages=false"
    assert state.on_announce(announced(5, header_region_uri=spelt_out), T0 + 1, True) == [Check()]
    demanding = announced(5).header_region_uri + "|require_hugepages=true"
    assert kinds(state.on_announce(announced(5, header_region_uri=demanding), T0 + 2, True)) == [Unmap, Map]


def test_a_later_answer_with_other_regions_in_the_mapped_epoch_remaps() -> None:
    """The driver's word counts as an announce does."""
    state = mapped_in(5)
    other = granted(1, header_region_uri="shm:file?path=/dev/shm/tp/elsewhere")
    assert state.on_attached(in_epoch(5), T0 + 1) == []
    assert kinds(state.on_attached(other, T0 + 2)) == [Unmap, Map]


@pytest.mark.parametrize("epoch", [0, 2**64 - 1])
def test_an_epoch_of_zero_or_null_is_none(epoch: int) -> None:
    """C17: neither an announce nor an answer can name a mapping by it."""
    assert not has_epoch(announced(epoch))
    assert has_epoch(announced(1))
    assert has_epoch(announced(2**64 - 2))
    with pytest.raises(RemoteProtocolError, match="epoch"):
        Regions.of(announced(epoch))


def test_without_a_driver_a_fresh_announce_is_mapped() -> None:
    """`on_listening` stands for the lease; losing the streams ends it."""
    state = MappingState(PERIOD_NS)
    state.on_listening()
    assert epochs_of(follow(state, state.on_announce(announced(5), T0, False))) == [5]
    assert kinds(state.on_lease_lost("the media driver is gone")) == [Unmap]
    assert state.on_announce(announced(5), T0 + 1, False) == []


@pytest.mark.spec("WIRE-15.21-07", "WIRE-15.18-04", "WIRE-10.1.1-10")
def test_a_higher_epoch_replaces_the_mapped_one_at_once() -> None:
    """C5: the first announce of the higher epoch unmaps the old one and maps the new one."""
    state = mapped_in(5)
    effects = follow(state, state.on_announce(announced(6, producer_id=3), T0 + 1, True))
    assert kinds(effects) == [Unmap, Map]
    assert epochs_of(effects) == [6]
    assert (state.epoch, state.producer_id) == (6, 3)


@pytest.mark.spec("WIRE-10.1.1-10")
@pytest.mark.parametrize("is_active", [True, False])
def test_a_lower_epoch_is_ignored_while_the_higher_one_is_announced(is_active: bool) -> None:
    """C1: a replayed announce tears nothing down."""
    state = mapped_in(5)
    for second in range(10):
        now_ns = T0 + second * PERIOD_NS
        assert state.on_announce(announced(4), now_ns, is_active) == []
        assert state.on_announce(announced(5), now_ns, is_active) == [Check()]
    assert state.epoch == 5


@pytest.mark.spec("WIRE-15.2-04", "WIRE-7.1-08")
@pytest.mark.parametrize("epoch", [2**64 - 2, 5])
def test_a_lower_epoch_is_mapped_once_the_higher_one_is_announced_no_more(epoch: int) -> None:
    """C1: the driver may have lost its history, or counted to the end."""
    state = mapped_in(epoch)
    assert state.on_announce(announced(1), T0 + WINDOW_NS, True) == []
    effects = follow(state, state.on_announce(announced(1), T0 + WINDOW_NS + 1, True))
    assert kinds(effects) == [Unmap, Map]
    assert state.epoch == 1


def test_the_highest_epoch_counts_also_while_nothing_is_mapped() -> None:
    """An announce that was rejected is still the newest word; its window over, lower ones count again."""
    state = mapped_in(5)
    assert epochs_of(state.on_announce(announced(7), T0, True)) == [7]
    state.on_rejected("no such file")
    assert state.on_announce(announced(5), T0 + PERIOD_NS, False) == []
    assert epochs_of(state.on_announce(announced(7), T0 + PERIOD_NS, False)) == [7]
    state.on_rejected("no such file")
    assert epochs_of(state.on_announce(announced(5), T0 + PERIOD_NS + WINDOW_NS + 1, False)) == [5]


@pytest.mark.spec("WIRE-15.13-01", "WIRE-15.1-07")
def test_rejected_regions_are_tried_again_with_the_next_announce() -> None:
    """C13: the files may not have been there yet."""
    state = MappingState(PERIOD_NS)
    assert epochs_of(state.on_attached(in_epoch(5), T0)) == [5]
    assert state.on_rejected("ENOENT") == []
    assert state.epoch is None
    assert epochs_of(state.on_announce(announced(5), T0 + 1, False)) == [5]


@pytest.mark.spec("WIRE-15.1-07", "WIRE-15.21-08")
def test_a_superblock_that_changed_unmaps() -> None:
    """What `Check` found to differ is let go; nothing is mapped again by itself."""
    state = mapped_in(5)
    effects = state.on_rejected("magic: expected …")
    assert effects == [Unmap("magic: expected …")]
    assert state.epoch is None
    assert state.on_seq_went_back() == []


@pytest.mark.spec("WIRE-15.14-03")
def test_an_epoch_that_two_processes_write_is_not_mapped_again() -> None:
    """C10: not when it is announced or granted again; only another epoch is mapped."""
    state = mapped_in(5)
    state.on_second_writer()
    assert kinds(state.on_rejected("pid: expected 1, found 2")) == [Unmap]
    assert state.on_announce(announced(5), T0 + 1, False) == []
    assert state.on_seq_went_back() == []
    state.on_lease_lost("EXPIRED")
    assert state.on_attached(in_epoch(5), T0 + 2) == []
    assert epochs_of(follow(state, state.on_announce(announced(6), T0 + 3, False))) == [6]


def test_an_epoch_whose_mapping_is_under_way_is_not_asked_for_twice() -> None:
    """A second answer in the same epoch changes nothing."""
    state = MappingState(PERIOD_NS)
    assert epochs_of(state.on_attached(in_epoch(5), T0)) == [5]
    assert state.on_attached(in_epoch(5), T0 + 1) == []


@pytest.mark.spec("WIRE-7.1-06")
def test_stale_regions_are_unmapped() -> None:
    """Their owner is dead. A fresh announce of the epoch maps it again."""
    state = mapped_in(5)
    assert kinds(state.on_stale()) == [Unmap]
    assert state.on_stale() == []
    assert epochs_of(state.on_announce(announced(5), T0 + 1, False)) == [5]


@pytest.mark.spec("WIRE-15.2-05", "WIRE-15.21-08")
def test_a_seq_that_went_back_maps_the_same_files_again() -> None:
    """B29: those that were last believed."""
    state = mapped_in(5)
    effects = follow(state, state.on_seq_went_back())
    assert effects == [Unmap("the seq went back"), Map(Regions.of(in_epoch(5)))]
    assert state.epoch == 5
    follow(state, state.on_announce(announced(6), T0 + 1, True))
    assert epochs_of(follow(state, state.on_seq_went_back())) == [6]


# --- leases


@pytest.mark.spec("DRV-4.7-06", "DRV-4.7-07", "DRV-4.13-12")
def test_without_the_lease_there_is_no_memory() -> None:
    """Unmapped at once; announces count again when there is a new lease."""
    state = mapped_in(5)
    assert state.on_lease_lost("EXPIRED") == [Unmap("EXPIRED")]
    assert state.on_lease_lost("EXPIRED") == []
    assert state.on_announce(announced(5), T0, False) == []
    assert state.on_announce(announced(6), T0, False) == []
    assert state.on_seq_went_back() == []
    assert epochs_of(state.on_attached(in_epoch(6), T0 + 1)) == [6]


def test_the_answer_to_a_new_attach_is_believed_also_when_it_is_lower() -> None:
    """A driver that lost its history says so itself."""
    state = mapped_in(5)
    state.on_lease_lost("DRIVER_GONE")
    effects = follow(state, state.on_attached(in_epoch(2), T0 + 1))
    assert epochs_of(effects) == [2]
    assert state.on_announce(announced(2), T0 + 1, True) == [Check()]


def test_an_answer_in_another_epoch_replaces_what_is_mapped() -> None:
    """Whichever is higher; the same one stays mapped."""
    for epoch, expected in ((6, [Unmap, Map]), (4, [Unmap, Map]), (5, [])):
        state = mapped_in(5)
        effects = follow(state, state.on_attached(in_epoch(epoch), T0 + 1))
        assert kinds(effects) == expected
        assert state.epoch == epoch


# --- the producer's end


@pytest.mark.spec("DRV-4.9-10", "DRV-4.9-19")
@pytest.mark.parametrize("reason", list(LeaseRevokeReason))
def test_after_the_producers_end_only_a_later_epoch_is_mapped(reason: LeaseRevokeReason) -> None:
    """The one that is over may still be announced for a moment; so may earlier ones."""
    state = mapped_in(5)
    assert kinds(state.on_producer_revoked(revoked(70, 9, reason=reason), T0)) == [Unmap]
    for epoch in (5, 4, 5):
        assert state.on_announce(announced(epoch), T0 + 1, False) == []
    assert state.epoch is None
    assert epochs_of(follow(state, state.on_announce(announced(6), T0 + 2, False))) == [6]
    assert state.on_tick(T0 + 10 * WINDOW_NS) is False


@pytest.mark.spec("DRV-4.9-16", "DRV-4.9-17")
def test_the_wait_for_the_next_epoch_has_an_end() -> None:
    """Three periods: then the owner asks the driver, again after three more, whatever is announced meanwhile."""
    state = mapped_in(5)
    state.on_producer_revoked(revoked(70, 9), T0)
    assert state.on_tick(T0 + WINDOW_NS - 1) is False
    for now_ns in (T0 + WINDOW_NS - 1, T0 + WINDOW_NS):
        assert state.on_announce(announced(5), now_ns, False) == []
    assert state.on_tick(T0 + WINDOW_NS) is True
    assert state.on_tick(T0 + WINDOW_NS + 1) is False
    assert state.on_announce(announced(5), T0 + WINDOW_NS + 1, False) == []
    assert state.on_tick(T0 + 2 * WINDOW_NS - 1) is False
    assert state.on_tick(T0 + 2 * WINDOW_NS) is True
    assert epochs_of(follow(state, state.on_announce(announced(6), T0 + 2 * WINDOW_NS, False))) == [6]
    assert state.on_tick(T0 + 10 * WINDOW_NS) is False


def test_a_new_attach_ends_the_wait() -> None:
    """What the driver answers is what there is, also the same epoch."""
    state = mapped_in(5)
    state.on_producer_revoked(revoked(70, 9), T0)
    assert epochs_of(follow(state, state.on_attached(in_epoch(5), T0 + 1))) == [5]
    assert state.on_announce(announced(5), T0 + 2, True) == [Check()]
    assert state.on_tick(T0 + 10 * WINDOW_NS) is False


@pytest.mark.spec("DRV-4.9-21")
def test_a_revocation_that_comes_twice_does_not_unmap_the_next_epoch() -> None:
    """Known by its lease id, also while no announce has named the new producer."""
    state = mapped_in(5)
    notice = revoked(70, 9)
    state.on_producer_revoked(notice, T0)
    assert state.on_producer_revoked(notice, T0) == []
    follow(state, state.on_announce(announced(6, producer_id=0), T0 + 1, False))
    assert state.on_producer_revoked(notice, T0 + 2) == []
    state.on_lease_lost("EXPIRED")
    follow(state, state.on_attached(in_epoch(7), T0 + 3))
    assert state.on_producer_revoked(notice, T0 + 4) == []
    assert state.epoch == 7


@pytest.mark.spec("DRV-4.9-11")
def test_the_end_of_a_lease_that_is_not_the_producers_of_this_epoch_is_passed_over() -> None:
    """The announce names its producer; 0 is no producer."""
    state = mapped_in(5)
    state.on_announce(announced(5, producer_id=9), T0, True)
    assert state.on_producer_revoked(revoked(70, 8), T0) == []
    assert state.epoch == 5
    state.on_announce(announced(5, producer_id=0), T0, True)
    assert state.on_producer_revoked(revoked(71, 8), T0) == []
    assert state.epoch == 5


def test_while_nothing_is_mapped_a_producers_end_changes_nothing() -> None:
    """There is no epoch to go beyond."""
    state = MappingState(PERIOD_NS)
    assert state.on_producer_revoked(revoked(70, 9), T0) == []
    state.on_attached(in_epoch(5), T0)
    assert state.on_producer_revoked(revoked(71, 9), T0) == []
    assert state.on_tick(T0 + 10 * WINDOW_NS) is False
