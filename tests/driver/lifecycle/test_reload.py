# SPDX-License-Identifier: Apache-2.0
"""Another configuration for a driver that runs: what it changes, and what it leaves alone because it is in use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorpool.driver.config import DriverConfig, StreamConfig
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.driver.reload import InUse, plan
from tensorpool.settings import ReloadRefused
from tensorpool.wire.driver import Role
from tests.driver.conftest import DYNAMIC, FRONT, REAR, SECOND_NS, attach, created, driver_config, serving
from tests.driver.lifecycle.conftest import CREATE, outline, with_producer

LARGE = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}


def without(overrides: dict[str, Any], *names: str, **added: int) -> DriverConfig:
    """The small configuration with these changes, without these streams and with those."""
    made = driver_config(overrides)
    streams = {name: stream for name, stream in made.streams.items() if name not in names}
    streams |= {name: StreamConfig(stream_id=id, profile="default") for name, id in added.items()}
    return msgspec.structs.replace(made, streams=streams)


def reload(lifecycle: Lifecycle, config: DriverConfig) -> list[str]:
    return outline(lifecycle.reload(plan(lifecycle.config, config, lifecycle.in_use())))


def refusal(lifecycle: Lifecycle, config: DriverConfig) -> str:
    """Why not; and nothing has changed."""
    before = lifecycle.config, {stream.stream_id for stream in lifecycle.streams}
    with pytest.raises(ReloadRefused, match="the configuration stays as it is: ") as caught:
        reload(lifecycle, config)
    assert (lifecycle.config, {stream.stream_id for stream in lifecycle.streams}) == before
    return str(caught.value).partition(": ")[2]


def test_streams_come_go_and_are_renamed() -> None:
    """The new one gets an epoch, the retired one loses its memory, a renamed one keeps its epoch."""
    lifecycle = serving()
    config = without({}, "front", "rear", side=10002, bow=FRONT)
    found = plan(lifecycle.config, config, lifecycle.in_use())
    assert [line for line in found.lines if "stream_id" in line] == [
        f"+ streams.bow.stream_id = {FRONT}",
        f"- streams.front.stream_id = {FRONT}",
        f"- streams.rear.stream_id = {REAR}",
        "+ streams.side.stream_id = 10002",
    ]
    assert outline(lifecycle.reload(found)) == [f"drop {REAR}", "create 10002"]
    bow, side = lifecycle.streams.get(FRONT), lifecycle.streams.get(10002)
    assert bow is not None
    assert side is not None
    assert (bow.name, side.name, lifecycle.streams.get(REAR)) == ("bow", "side", None)
    assert bow.current is not None


def test_a_stream_that_is_retired_while_its_memory_is_made_leaves_none() -> None:
    """The epoch that arrives afterwards is dropped."""
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    assert reload(lifecycle, without({}, "rear")) == [f"drop {REAR}"]
    assert outline(created(lifecycle, REAR, 1, 0)) == [f"drop {REAR}"]


def test_another_profile_is_for_the_next_epoch() -> None:
    """At once without a producer; with one its ring stays as it is until the next producer."""
    lifecycle = with_producer()
    config = driver_config({"profiles.large": LARGE, "streams.front.profile": "large", "streams.rear.profile": "large"})
    assert reload(lifecycle, config) == [f"create {REAR}"]
    front = lifecycle.streams.get(FRONT)
    assert front is not None
    assert front.current is not None
    assert front.current.ring != front.ring == config.profiles["large"].ring
    assert reload(lifecycle, config) == []


def test_a_stream_in_use_is_not_retired() -> None:
    """Every holder is named, and so is every other reason; also for an attach that still waits."""
    lifecycle = with_producer(client_id=7)
    lifecycle.on_attach(attach(8, FRONT), 0)
    lifecycle.on_attach(attach(9, REAR, Role.PRODUCER), 0)
    config = without({"policies.announce_period_ms": 50, "driver.control_stream_id": 2000}, "front", "rear")
    text = refusal(lifecycle, without({"policies.allow_dynamic_streams": True}, "front", "rear"))
    assert text == (
        f'stream "front" ({FRONT}) is in use by producer client 7 (lease 500), consumer client 8 (lease 501); '
        f'stream "rear" ({REAR}) is in use by producer client 9, which is attaching'
    )
    text = refusal(lifecycle, config)
    assert "driver.control_stream_id = 2000 (was 1000) needs a restart" in text
    assert "policies.announce_period_ms = 50 (was 1000) needs a restart" in text
    assert text.endswith("producer client 9, which is attaching")


def test_a_range_keeps_what_clients_have() -> None:
    """A stream that a client created and uses, and an id that was lent, stay inside; unused streams go."""
    lifecycle = serving()
    for client_id, stream_id in ((1, DYNAMIC[1]), (2, DYNAMIC[2])):
        lifecycle.on_attach(attach(client_id, stream_id, Role.PRODUCER, publish_mode=CREATE), 0)
        created(lifecycle, stream_id, 1, 0, reserved=True)
    lifecycle.revoke(501, "", 0)
    created(lifecycle, DYNAMIC[2], 2, 0)
    text = refusal(lifecycle, driver_config({"driver.stream_id_range": [DYNAMIC[0], DYNAMIC[0]]}))
    assert text == "driver.stream_id_range 20000-20000: stream 20001 is in use by producer client 1 (lease 500)"
    narrower = driver_config({"driver.stream_id_range": [DYNAMIC[0], DYNAMIC[1]]})
    assert reload(lifecycle, narrower) == [f"drop {DYNAMIC[2]}"]

    lifecycle.on_attach(attach(5, FRONT), 0)
    lent = lifecycle.private_streams.descriptor_ids.lend((FRONT, 5))
    assert lent == 31000
    text = refusal(lifecycle, driver_config({"driver.descriptor_stream_id_range": [31001, 31005]}))
    assert "driver.descriptor_stream_id_range 31001-31005: consumers have 31000" in text


def test_a_range_that_grows_lends_the_new_ids_and_no_id_twice() -> None:
    """Ids that are lent are not lent again, and come back where the range has them."""
    lifecycle = serving()
    ids = lifecycle.private_streams.descriptor_ids
    assert [ids.lend((FRONT, client)) for client in (1, 2, 3)] == [31000, 31001, None]
    reload(lifecycle, driver_config({"driver.descriptor_stream_id_range": [30999, 31002]}))
    assert [ids.lend((FRONT, client)) for client in (3, 4, 5)] == [30999, 31002, None]
    ids.give_back((FRONT, 1))
    assert ids.lend((FRONT, 5)) == 31000


def test_a_stream_that_a_client_created_becomes_a_configured_one() -> None:
    """Once it is unused: then it does not go any more."""
    lifecycle = serving()
    lifecycle.on_attach(attach(1, DYNAMIC[2], Role.PRODUCER, publish_mode=CREATE), 0)
    created(lifecycle, DYNAMIC[2], 1, 0, reserved=True)
    config = driver_config({"streams.mine.stream_id": DYNAMIC[2], "driver.stream_id_range": [DYNAMIC[0], DYNAMIC[1]]})
    assert "is in use by producer client 1" in refusal(lifecycle, config)
    lifecycle.revoke(500, "", 0)
    created(lifecycle, DYNAMIC[2], 2, 0)
    assert reload(lifecycle, config) == []
    lifecycle.on_tick(100 * SECOND_NS)
    lifecycle.on_tick(200 * SECOND_NS)
    assert lifecycle.streams.get(DYNAMIC[2]) is not None


def test_limits_hold_from_now_on() -> None:
    """Below what is held nothing ends; the next attach is refused."""
    lifecycle = with_producer()
    reload(lifecycle, driver_config({"policies.max_leases": 1}))
    (refused,) = outline(lifecycle.on_attach(attach(9, FRONT), 0))
    assert refused == "attach REJECTED"
    assert len(lifecycle.leases) == 1


def test_a_secret_that_changes_is_not_shown() -> None:
    """Only that it does."""
    found = plan(driver_config(), driver_config({"policies.shutdown_token": "open"}), InUse())
    assert found.lines == ("~ policies.shutdown_token = <hidden> (was <hidden>)",)


def test_the_same_configuration_changes_nothing() -> None:
    """No lines, no effects."""
    lifecycle = with_producer()
    assert reload(lifecycle, driver_config()) == []
    assert plan(lifecycle.config, driver_config(), lifecycle.in_use()).lines == ()
