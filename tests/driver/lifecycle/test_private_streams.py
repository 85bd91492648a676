# SPDX-License-Identifier: Apache-2.0
"""Which stream ids the driver lends to consumers, and when it takes them back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.control import ConsumerHello, Mode
from tensorpool.wire.driver import Role
from tests.driver.conftest import FRONT, LEASE_NS, REAR, SECOND_NS, attach, created, detach, keepalive, serving
from tests.driver.lifecycle.conftest import only_message, outline
from tests.support import messages


def hello(
    consumer_id: int = 3,
    stream_id: int = FRONT,
    *,
    descriptor: tuple[str, int] = ("", 0),
    control: tuple[str, int] = ("", 0),
) -> ConsumerHello:
    return messages.hello(
        stream_id,
        consumer_id,
        mode=Mode.RATE_LIMITED,
        max_rate_hz=30,
        descriptor_channel=descriptor[0],
        descriptor_stream_id=descriptor[1],
        control_channel=control[0],
        control_stream_id=control[1],
    )


ANY = ("aeron:ipc", 0)


def consuming(*client_ids: int, period_ms: int = 1000, changed: dict[str, Any] | None = None) -> Lifecycle:
    """A driver with consumers of the first stream: their leases are 500 and up. `changed`: keys of its `driver`."""
    overrides = {f"driver.{key}": value for key, value in (changed or {}).items()}
    intervals = {"policies.announce_period_ms": period_ms, "policies.lease_keepalive_interval_ms": period_ms}
    lifecycle = serving(overrides | intervals)
    for client_id in client_ids:
        lifecycle.on_attach(attach(client_id), 0)
    return lifecycle


@pytest.mark.spec("DRV-11-04", "DRV-11-05")
def test_a_consumer_that_asks_with_a_channel_and_id_0_is_lent_ids() -> None:
    """§11, E22: from their ranges, on the channels that it named, the same again at every hello."""
    lifecycle = consuming(3)
    asked = hello(descriptor=("aeron:ipc?mtu=8k", 0), control=ANY)
    answer = only_message(lifecycle.on_consumer_hello(asked, 0))
    assert answer == messages.consumer_config(
        FRONT,
        3,
        mode=Mode.RATE_LIMITED,
        descriptor_stream_id=31000,
        control_stream_id=32000,
        descriptor_channel="aeron:ipc?mtu=8k",
        control_channel="aeron:ipc",
    )
    assert only_message(lifecycle.on_consumer_hello(asked, SECOND_NS)) == answer


@pytest.mark.parametrize(
    "asked",
    [
        hello(),
        hello(descriptor=("aeron:ipc", 4000), control=("aeron:ipc", 4001)),
        hello(descriptor=("", 4000)),
        hello(stream_id=4711, descriptor=ANY),
    ],
)
def test_hellos_that_are_the_producers_are_passed_over(asked: ConsumerHello) -> None:
    """E24: no request, explicit ids, half requests, and streams of other drivers."""
    lifecycle = serving()
    assert lifecycle.on_consumer_hello(asked, 0) == []
    assert len(lifecycle.private_streams) == 0


@pytest.mark.spec("DRV-11-07")
def test_what_cannot_be_lent_is_declined_with_nothing() -> None:
    """E25: empty channel and 0 for a used-up range, beside the id that there is."""
    lifecycle = consuming(1, 2, 3)
    lifecycle.on_consumer_hello(hello(1, descriptor=ANY, control=ANY), 0)
    answer = only_message(lifecycle.on_consumer_hello(hello(2, descriptor=ANY, control=ANY), 0))
    assert (answer.descriptor_stream_id, answer.descriptor_channel) == (31001, "aeron:ipc")
    assert (answer.control_stream_id, answer.control_channel) == (0, "")
    answer = only_message(lifecycle.on_consumer_hello(hello(3, descriptor=ANY), 0))
    assert (answer.descriptor_stream_id, answer.descriptor_channel) == (0, "")


@pytest.mark.spec("DRV-11-06")
def test_without_ranges_every_request_is_declined() -> None:
    """E25: the consumer stays on the shared streams."""
    lifecycle = serving({"driver.descriptor_stream_id_range": "", "driver.control_stream_id_range": ""})
    assert outline(lifecycle.on_consumer_hello(hello(descriptor=ANY, control=ANY), 0)) == ["ids 0 0"]


@pytest.mark.parametrize("ending", ["detach", "expiry", "revoke"])
def test_ids_come_back_with_the_end_of_the_lease(ending: str) -> None:
    """E28: whichever way it ends, the next consumer may have them."""
    lifecycle = consuming(3)
    lifecycle.on_attach(attach(4), 1)
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), 0)) == ["ids 0 0"]
    match ending:
        case "detach":
            lifecycle.on_detach(detach(500, 3), 1)
        case "expiry":
            lifecycle.on_consumer_hello(hello(3, control=ANY), LEASE_NS)
            lifecycle.on_tick(LEASE_NS)
        case "revoke":
            lifecycle.revoke(500, "", 1)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), LEASE_NS)) == ["ids 0 32000"]


def test_an_override_by_another_process_is_repeated_to_a_consumer_with_lent_ids() -> None:
    """Wire §10.1.3: with every answer, until it asks for another mode or is gone; nothing is kept of anybody else."""
    lifecycle = consuming(3)
    asked = hello(3, control=ANY)
    plain = only_message(lifecycle.on_consumer_hello(asked, 0))
    decree = messages.consumer_config(FRONT, 3, use_shm=False, payload_fallback_uri="bridge://lab")
    lifecycle.on_consumer_config(decree)
    lifecycle.on_consumer_config(msgspec.structs.replace(decree, consumer_id=4))
    overridden = msgspec.structs.replace(plain, use_shm=False, mode=Mode.STREAM, payload_fallback_uri="bridge://lab")
    for _ in range(2):
        assert only_message(lifecycle.on_consumer_hello(asked, 1)) == overridden
    declined = only_message(lifecycle.on_consumer_hello(hello(4, control=ANY), 1))
    assert (declined.use_shm, declined.mode, declined.payload_fallback_uri) == (True, Mode.RATE_LIMITED, "")
    other_wish = msgspec.structs.replace(asked, mode=Mode.STREAM)
    assert only_message(lifecycle.on_consumer_hello(other_wish, 1)) == msgspec.structs.replace(plain, mode=Mode.STREAM)
    lifecycle.on_consumer_config(decree)
    lifecycle.on_detach(detach(500, 3), 1)
    lifecycle.on_attach(attach(3), 2)
    assert only_message(lifecycle.on_consumer_hello(asked, 2)) == plain


@pytest.mark.parametrize("uri", ["x" * 600_000, "bridge://\u00e9", "bridge://\n", "bridge://\udcff"])
def test_a_fallback_that_no_answer_can_carry_is_counted_and_not_kept(uri: str) -> None:
    """What the driver keeps of messages is bounded: a ConsumerConfig may come from any process."""
    lifecycle = consuming(3)
    asked = hello(3, control=ANY)
    plain = only_message(lifecycle.on_consumer_hello(asked, 0))
    lifecycle.on_consumer_config(messages.consumer_config(FRONT, 3, use_shm=False, payload_fallback_uri=uri))
    assert only_message(lifecycle.on_consumer_hello(asked, 1)) == plain
    assert lifecycle.counts["consumer_configs_refused"] == 1


def test_ids_are_lent_only_to_consumers_with_a_lease_on_the_stream() -> None:
    """E43: hellos of anybody else, a producer's among them, are declined and leave nothing behind."""
    lifecycle = consuming(3)
    lifecycle.on_attach(attach(5, role=Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, reserved=True)
    wanted: dict[str, Any] = {"descriptor": ANY, "control": ANY}
    strangers = [hello(3, stream_id=REAR, **wanted), hello(4, **wanted), hello(5, **wanted)]
    strangers += [hello(number, **wanted) for number in (0, 2**32 - 1)]
    for stranger in strangers:
        assert outline(lifecycle.on_consumer_hello(stranger, 0)) == ["ids 0 0"]
    assert len(lifecycle.private_streams) == lifecycle.private_streams.ids_lent == 0
    assert outline(lifecycle.on_consumer_hello(hello(3, **wanted), 0)) == ["ids 31000 32000"]


@pytest.mark.spec("WIRE-5-04")
@pytest.mark.parametrize("period_ms", [100, 1000, 10_000])
def test_ids_come_back_from_a_consumer_that_is_silent_for_four_periods(period_ms: int) -> None:
    """E28: hellos come once in an announce period; each starts the wait anew, also one that asks for nothing."""
    lifecycle = consuming(3, 4, period_ms=period_ms)
    period_ns = lifecycle.config.announce_period_ns
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    lifecycle.on_consumer_hello(hello(3), 3 * period_ns)
    for period in range(4, 13):
        now_ns = period * period_ns
        for lease_id, client_id in ((500, 3), (501, 4)):
            lifecycle.on_keepalive(keepalive(lease_id, client_id), now_ns)
        lifecycle.on_tick(now_ns)
        answer = outline(lifecycle.on_consumer_hello(hello(4, control=ANY), now_ns))
        assert answer == (["ids 0 0"] if period < 3 + 4 else ["ids 0 32000"]), period


MIXED = {
    "descriptors by the driver": hello(3, descriptor=ANY, control=("aeron:ipc", 4001)),
    "progress by the driver": hello(3, descriptor=("aeron:ipc", 4000), control=ANY),
}


@pytest.mark.spec("WIRE-10.1.3-09", "DRV-11-05")
@pytest.mark.parametrize("asked", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "declined"])
def test_an_answer_of_the_producer_is_completed_with_the_drivers_id(asked: ConsumerHello, is_granted: bool) -> None:
    """E24: the driver never declines what the producer answers: it repeats that answer, once, with its own id in it."""
    lifecycle = consuming(3)
    assert lifecycle.on_consumer_hello(asked, 0) == []
    streams = ("descriptor_stream_id", "descriptor_channel"), ("control_stream_id", "control_channel")
    granted = {name: getattr(asked, name) for pair in streams if getattr(asked, pair[0]) for name in pair}
    said = messages.consumer_config(FRONT, 3, mode=asked.mode, **granted if is_granted else {})
    answer = only_message(lifecycle.on_consumer_config(said))
    by_driver = (
        {"control_stream_id": 32000, "control_channel": "aeron:ipc"}
        if asked.descriptor_stream_id
        else {"descriptor_stream_id": 31000, "descriptor_channel": "aeron:ipc"}
    )
    assert answer == msgspec.structs.replace(said, **by_driver)
    assert lifecycle.on_consumer_config(answer) == []
    assert lifecycle.on_consumer_hello(asked, 1) == []
    assert only_message(lifecycle.on_consumer_config(said)) == answer


@pytest.mark.parametrize("asked", MIXED.values(), ids=MIXED)
def test_an_answer_of_the_producer_stands_where_there_is_no_id_to_add(asked: ConsumerHello) -> None:
    """No range, no lease, a channel that may not be: the driver adds nothing to the producer's answer."""
    said = messages.consumer_config(FRONT, 3)
    without_ranges = consuming(3, changed={"descriptor_stream_id_range": "", "control_stream_id_range": ""})
    without_lease = consuming(4)
    elsewhere = "aeron:udp?endpoint=10.0.0.9:40123"
    changed = {
        name: elsewhere
        for name in ("descriptor_channel", "control_channel")
        if not getattr(asked, name.replace("channel", "stream_id"))
    }
    for lifecycle, wish in (
        (without_ranges, asked),
        (without_lease, asked),
        (consuming(3), msgspec.structs.replace(asked, **changed)),
    ):
        assert lifecycle.on_consumer_hello(wish, 0) == []
        assert lifecycle.on_consumer_config(said) == []
        assert len(lifecycle.private_streams) == 0


def test_ids_are_lent_for_channels_that_a_producer_may_open() -> None:
    """Over IPC, or over the media of the shared descriptor stream; of any other channel nothing is lent."""
    elsewhere = ("aeron:udp?endpoint=10.0.0.9:40123", 0)
    assert outline(consuming(3).on_consumer_hello(hello(3, descriptor=elsewhere), 0)) == ["ids 0 0"]
    over_udp = consuming(3, changed={"descriptor_channel": "aeron:udp?endpoint=127.0.0.1:40124"})
    assert outline(over_udp.on_consumer_hello(hello(3, descriptor=elsewhere), 0)) == ["ids 31000 0"]


def test_a_stall_of_the_driver_takes_no_ids_away() -> None:
    """Hellos that it could not read are not held against their consumers: two of them would share one id."""
    lifecycle = consuming(3, 4)
    lifecycle.on_consumer_hello(hello(3, control=ANY), 0)
    back_ns = 50 * SECOND_NS
    lifecycle.on_stall(back_ns)
    lifecycle.on_tick(back_ns)
    assert outline(lifecycle.on_consumer_hello(hello(4, control=ANY), back_ns)) == ["ids 0 0"]
    assert outline(lifecycle.on_consumer_hello(hello(3, control=ANY), back_ns)) == ["ids 0 32000"]
