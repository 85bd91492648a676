# SPDX-License-Identifier: Apache-2.0
"""What counts as another driver on our control stream, and what follows from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.clock import ManualClock
from tensorpool.driver.authority import MAX_CLAIM_CHARS, MAX_CLAIMS, Authority, probe_answer, probes
from tensorpool.driver.config import DriverConfig
from tensorpool.driver.effects import CreateEpoch, Send
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.driver.other_drivers import OtherDrivers
from tensorpool.logs import get_logger
from tensorpool.wire.attach import AttachRequest
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ResponseCode, Role, ShmAttachResponse
from tests.support.driver_client import attach_request
from tests.support.messages import announce

PERIOD_NS = 1_000_000_000
START_NS = 100 * PERIOD_NS
LATER_NS = START_NS + 10 * PERIOD_NS
OURS = "/dev/shm/tensorpool/tensorpool-me/lab"
STREAM = 10_000


def of_ours(stream_id: int = STREAM, epoch: int = 5) -> ShmPoolAnnounce:
    return announce(stream_id, epoch=epoch, below=OURS)


def of_theirs(stream_id: int = STREAM, epoch: int = 5) -> ShmPoolAnnounce:
    return announce(stream_id, epoch=epoch, below="/dev/shm/tensorpool/tensorpool-me/other")


def refusal(correlation_id: int) -> ShmAttachResponse:
    return ShmAttachResponse(correlation_id=correlation_id, code=ResponseCode.REJECTED, error_message="no")


def grant(correlation_id: int, stream_id: int = STREAM) -> ShmAttachResponse:
    return ShmAttachResponse(correlation_id=correlation_id, code=ResponseCode.OK, stream_id=stream_id)


@pytest.fixture
def authority() -> Authority:
    authority = Authority(PERIOD_NS, f"shm:file?path={OURS}/")
    authority.on_start(START_NS)
    authority.on_epoch_created(STREAM, 5)
    return authority


def test_an_answer_to_our_probe_is_proof_within_the_first_announce_period(authority: Authority) -> None:
    """A driver that was busy was here before us all the same; later no message ends a driver that serves."""
    limit_ns = START_NS + PERIOD_NS * 5 // 4
    assert authority.on_response(probe_answer(START_NS), limit_ns + 1) is None
    assert not authority.earlier_driver
    assert authority.on_response(probe_answer(START_NS), limit_ns) is None
    assert "REJECTED" in authority.earlier_driver


def test_only_the_probe_of_a_later_driver_is_answered(authority: Authority) -> None:
    """Of two that start at once the earlier one stays; one that died left an earlier probe in the log."""

    def is_answered(request: AttachRequest) -> bool:
        return authority.is_later_probe(request.correlation_id, request.stream_id, request.client_id)

    assert all(map(is_answered, probes(START_NS + 1)))
    assert not any(map(is_answered, probes(START_NS)))
    assert not any(map(is_answered, probes(START_NS - 1)))
    assert not is_answered(attach_request(STREAM, correlation_id=START_NS + 1))
    assert not is_answered(attach_request(STREAM, client_id=0, correlation_id=START_NS + 1))


@pytest.mark.parametrize("epoch", [5, 4])
def test_announces_of_our_own_memory_say_nothing(authority: Authority, epoch: int) -> None:
    """Producers of other implementations announce by themselves, also for a while after their epoch has ended."""
    assert authority.on_announce(of_ours(epoch=epoch), LATER_NS) is None
    assert authority.claim_on(STREAM, LATER_NS) is None


def test_announces_of_an_earlier_run_say_nothing(authority: Authority) -> None:
    """No epoch of that stream was made yet in this run; a producer goes on announcing the one before."""
    assert authority.on_announce(of_ours(STREAM + 1, epoch=3), LATER_NS) is None
    assert authority.claim_on(STREAM + 1, LATER_NS) is None


@pytest.mark.parametrize("seen", [of_theirs(epoch=5), of_theirs(epoch=9), of_ours(epoch=6)])
def test_announces_of_other_memory_are_a_claim(authority: Authority, seen: ShmPoolAnnounce) -> None:
    """Regions that are not ours, or an epoch that we have not made."""
    assert authority.on_announce(seen, LATER_NS) == STREAM
    words = authority.claim_on(STREAM, LATER_NS)
    assert words is not None
    assert seen.header_region_uri in words
    assert not authority.earlier_driver


def test_one_foreign_pool_among_our_own_regions_is_a_claim(authority: Authority) -> None:
    """Every URI counts."""
    mixed = of_ours()
    pools = of_theirs().payload_pools
    seen = ShmPoolAnnounce(
        **{name: getattr(mixed, name) for name in mixed.__struct_fields__} | {"payload_pools": pools}
    )
    assert authority.on_announce(seen, LATER_NS) == STREAM


def test_an_answer_that_is_not_ours_claims_the_stream_of_its_request(authority: Authority) -> None:
    """A grant names its stream; a refusal has that of its request; without the request nothing is claimed."""
    authority.on_request(attach_request(STREAM + 1, correlation_id=77))
    assert authority.on_response(grant(1), LATER_NS) == STREAM
    assert authority.on_response(refusal(77), LATER_NS) == STREAM + 1
    assert authority.on_response(refusal(78), LATER_NS) is None


def test_a_claim_ends_after_three_announce_periods_of_silence(authority: Authority) -> None:
    """Each further sign of the other prolongs it, and only the first is reported."""
    assert authority.on_announce(of_theirs(), LATER_NS) == STREAM
    again_ns = LATER_NS + PERIOD_NS
    assert authority.on_announce(of_theirs(), again_ns) is None
    last_ns = again_ns + 3 * PERIOD_NS - 1
    assert authority.expire(last_ns) == []
    assert authority.claim_on(STREAM, last_ns) is not None
    assert authority.claim_on(STREAM, last_ns + 1) is None
    assert authority.expire(last_ns + 1) == [STREAM]
    assert authority.on_announce(of_theirs(), last_ns + 2) == STREAM


def test_a_claim_on_our_stream_ends_us_within_the_first_announce_period_only(authority: Authority) -> None:
    """By then every driver that was here before us has announced; later the other one is the newcomer."""
    limit_ns = START_NS + PERIOD_NS * 5 // 4
    authority.on_announce(of_theirs(), limit_ns + 1)
    authority.on_own_stream_claimed(STREAM, limit_ns + 1)
    assert not authority.earlier_driver
    authority.on_own_stream_claimed(STREAM, limit_ns)
    assert of_theirs().header_region_uri in authority.earlier_driver


def test_claims_are_bounded(authority: Authority) -> None:
    """The oldest goes first, and of what was said a line is kept."""
    for number in range(MAX_CLAIMS + 1):
        authority.on_announce(of_theirs(1 + number), LATER_NS)
    assert authority.claim_on(1, LATER_NS) is None
    assert authority.claim_on(MAX_CLAIMS + 1, LATER_NS) is not None
    authority.on_announce(announce(STREAM, below="/" + "x" * 100_000), LATER_NS)
    words = authority.claim_on(STREAM, LATER_NS)
    assert words is not None
    assert len(words) == MAX_CLAIM_CHARS


# --- what the driver does


@pytest.fixture
def lifecycle() -> Lifecycle:
    pool = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
    tables: dict[str, Any] = {"profiles": {"small": pool}, "streams": {"s": {"stream_id": STREAM, "profile": "small"}}}
    config = DriverConfig.load(environ={}, overrides=tables)
    return Lifecycle(config, first_lease_id=1, root=f"shm:file?path={OURS}/")


def answer(effects: list[Any]) -> ShmAttachResponse:
    (send,) = effects
    assert isinstance(send, Send)
    assert isinstance(send.message, ShmAttachResponse)
    return send.message


@pytest.mark.spec("DRV-2.1-02")
def test_a_claimed_stream_is_not_granted_until_the_other_is_silent(lifecycle: Lifecycle) -> None:
    """The refusal says what was seen; afterwards the same request goes through."""
    lifecycle.authority.on_announce(of_theirs(), LATER_NS)
    request = attach_request(STREAM, Role.PRODUCER)
    refused = answer(lifecycle.on_attach(request, LATER_NS))
    assert refused.code is ResponseCode.REJECTED
    assert of_theirs().header_region_uri in refused.error_message
    (create,) = lifecycle.on_attach(request, LATER_NS + 3 * PERIOD_NS)
    assert isinstance(create, CreateEpoch)


def test_an_attach_that_waits_for_memory_is_refused_when_its_stream_is_claimed(lifecycle: Lifecycle) -> None:
    """It must not be granted when the memory is there."""
    request = attach_request(STREAM, Role.PRODUCER)
    lifecycle.on_attach(request, LATER_NS)
    lifecycle.authority.on_announce(of_theirs(), LATER_NS)
    refused = answer(lifecycle.on_claim(STREAM, LATER_NS))
    assert (refused.correlation_id, refused.code) == (request.correlation_id, ResponseCode.REJECTED)
    assert lifecycle.on_claim(STREAM, LATER_NS) == []


def test_an_announce_of_another_driver_refuses_the_attach_that_waits(lifecycle: Lifecycle) -> None:
    """`OtherDrivers` hands the claim on."""
    clock = ManualClock(monotonic_ns=START_NS)
    other_drivers = OtherDrivers(lifecycle.config, clock, lifecycle, get_logger("driver"))
    other_drivers.on_start()
    clock.advance(LATER_NS - START_NS)
    request = attach_request(STREAM, Role.PRODUCER)
    lifecycle.on_attach(request, LATER_NS)
    theirs = msgspec.structs.replace(of_theirs(), announce_timestamp_ns=LATER_NS)
    refused = answer(other_drivers.on_announce(theirs, is_before=False))
    assert (refused.correlation_id, refused.code) == (request.correlation_id, ResponseCode.REJECTED)
    assert other_drivers.failure is None, "a driver that has served for long stays"
