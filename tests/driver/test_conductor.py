# SPDX-License-Identifier: Apache-2.0
"""A part of the driver's turn that fails harms no other part; the decisions have tests of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.driver.clients import DECLARATION_NS
from tensorpool.errors import Closed, TransportError
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
)
from tests.driver.conftest import attach
from tests.driver.test_clients import owner
from tests.fuzz.driver_conversation import FRONT, INFO, MS, REAR, Conversation, configured

UNLUCKY, LUCKY = 666, 5


@pytest.fixture
def driver() -> Iterator[Conversation]:
    """A conductor whose transport and memory are the test's."""
    with configured() as config:
        yield Conversation(config, random.Random(1))


def fails(*_: object, **__: Any) -> Any:
    raise RuntimeError("this one fails")


def failing_for(client_id: int, method: Callable[..., Any]) -> Callable[..., Any]:
    def on_attach(request: ShmAttachRequest, now_ns: int) -> Any:
        return fails() if request.client_id == client_id else method(request, now_ns)

    return on_attach


def answered(said: list[Any]) -> list[int]:
    return [it.correlation_id for it in said if isinstance(it, ShmAttachResponse) and it.code is ResponseCode.OK]


def test_a_message_that_fails_costs_no_other_client_its_answer(
    driver: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before and behind it in the same turn are answered."""
    life = driver.conductor.lifecycle
    monkeypatch.setattr(life, "on_attach", failing_for(UNLUCKY, life.on_attach))
    for number, client_id in enumerate((LUCKY, UNLUCKY, LUCKY + 1)):
        driver.streams.inbox.append(attach(client_id, correlation_id=number).encode())
    assert answered(driver.turn()) == [0, 2]
    assert life.counts["failures"] == 1


@pytest.mark.parametrize("part", ["on_tick", "order", "outcome", "effect", "collect", "service", "announce"])
def test_a_part_that_fails_at_every_turn_stops_no_other(
    driver: Conversation, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Time, orders, memory, housekeeping, commands, one stream's announce: attaches are answered all the same."""
    conductor, life = driver.conductor, driver.conductor.lifecycle
    match part:
        case "on_tick":
            monkeypatch.setattr(life, "on_tick", fails)
        case "order":
            conductor._orders.extend([fails, fails])
            assert driver.lease is not None
            conductor.revoke(driver.lease)
        case "outcome":
            monkeypatch.setattr(driver.memory, "take_finished", fails)
        case "effect":
            monkeypatch.setattr(driver.memory, "submit", fails)
            driver.streams.inbox.append(attach(UNLUCKY, 20_000, publish_mode=PublishMode.EXISTING_OR_CREATE).encode())
        case "collect":
            monkeypatch.setattr(driver.memory, "collect", fails)
        case "service":
            monkeypatch.setattr(conductor._service, "invoke", fails)
        case "announce":
            made = life.announce
            monkeypatch.setattr(life, "announce", lambda id_, now_ns: made(id_, now_ns) if id_ != FRONT else fails())
    said: list[Any] = []
    for number in range(3):
        driver.streams.inbox.append(attach(LUCKY + number, correlation_id=number).encode())
        said += driver.turn(life.config.announce_period_ns)
    assert answered(said) == [0, 1, 2]
    assert life.counts["failures"] > 0
    if part == "order":
        assert [it.lease_id for it in said if isinstance(it, ShmLeaseRevoked)] == [driver.lease]
    if part not in ("on_tick",):
        assert REAR in [it.stream_id for it in said if isinstance(it, ShmPoolAnnounce)]


def test_an_effect_that_fails_takes_no_other_with_it(driver: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two producers expire in one turn: both ends are sent, though no new epoch can be ordered for either."""
    for number, stream_id in enumerate((FRONT, REAR)):
        driver.ask(attach(LUCKY + number, stream_id, Role.PRODUCER))
    driver.turn()
    leases = {lease.lease_id for lease in driver.conductor.lifecycle.leases if lease.role is Role.PRODUCER}
    assert len(leases) == 2
    monkeypatch.setattr(driver.memory, "submit", fails)
    said: list[Any] = []
    for _ in range(4):
        said += driver.turn(driver.conductor.lifecycle.config.lease_keepalive_interval_ns)
    assert leases <= {it.lease_id for it in said if isinstance(it, ShmLeaseRevoked)}
    assert driver.conductor.lifecycle.counts["failures"] >= 2


def test_failures_are_logged_once_a_second(
    driver: Conversation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With how many were not: a turn that fails at every millisecond does not fill the disk."""
    monkeypatch.setattr(driver.conductor.lifecycle, "on_tick", fails)
    for _ in range(2500):
        driver.turn(MS)
    words = [record.getMessage() for record in caplog.records if record.getMessage().startswith("turn_failed")]
    assert len(words) == 3
    assert [int(text.split("suppressed=")[1].split()[0]) for text in words] == [0, 999, 999]
    assert driver.conductor.lifecycle.counts["failures"] == 2500


@pytest.mark.parametrize("error", [TransportError("gone"), Closed("closed")])
def test_a_log_that_is_gone_gives_up_the_connection_and_not_the_driver(
    driver: Conversation, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It looks for the media driver again; nothing raises."""

    def offer(_: bytes) -> aeron.OfferResult:
        raise error

    monkeypatch.setattr(driver.streams.answers, "offer", offer)
    driver.streams.inbox.append(attach(LUCKY).encode())
    driver.turn()
    assert driver.conductor._streams is None
    monkeypatch.setattr(driver.conductor._connection._liveness, "is_dead", lambda: True)
    driver.turn()
    assert driver.conductor.lifecycle.counts["failures"] == 0


def test_a_driver_whose_turns_fail_still_ends(driver: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order to shut down takes effect after the shutdown timeout, and the notice is sent."""
    for name in ("on_attach", "on_keepalive", "announce"):
        monkeypatch.setattr(driver.conductor.lifecycle, name, fails)
    monkeypatch.setattr(driver.memory, "take_finished", fails)
    driver.conductor.shut_down(text="test")
    said: list[Any] = []
    for _ in range(25):
        if not driver.is_over:
            driver.streams.inbox.append(attach(LUCKY).encode())
            said = driver.turn(100 * MS)
    assert driver.is_over
    assert isinstance(said[-1], ShmDriverShutdown)


def test_a_silent_lease_ends_however_short_the_keepalive_interval_is() -> None:
    """Turns of two milliseconds are no stalls: with an interval of 2 ms a lease ends after three of them."""
    with configured({"policies.lease_keepalive_interval_ms": 2}) as config:
        driver = Conversation(config, random.Random(1))
        said = [message for _ in range(10) for message in driver.turn(3 * MS)]
        assert [it.lease_id for it in said if isinstance(it, ShmLeaseRevoked)] == [driver.lease]
        assert driver.conductor.lifecycle.counts["stalls"] == 0


@pytest.mark.parametrize("is_declared", [True, False])
def test_with_limits_for_users_an_attach_waits_for_its_declaration(driver: Conversation, is_declared: bool) -> None:
    """Until it comes, or a moment has passed; the user that counts is then known."""
    conductor, life = driver.conductor, driver.conductor.lifecycle
    policies = msgspec.structs.replace(life.config.policies, max_user_leases=2)
    conductor._config = life.config = msgspec.structs.replace(life.config, policies=policies)
    assert answered(driver.ask(attach(LUCKY, correlation_id=1))) == []
    if is_declared:
        life.on_identify(INFO.session_id, owner(user="lab"))
        said = driver.turn()
    else:
        said = driver.turn(DECLARATION_NS)
    assert answered(said) == [1]
    lease = life.leases.of_client(LUCKY)
    assert lease is not None
    assert lease.user == ("lab" if is_declared else None)
