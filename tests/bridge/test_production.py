# SPDX-License-Identifier: Apache-2.0
"""A receiver as an operator runs it: what it logs, what it counts as forwarded, and whose QoS it repeats."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.supervisor import SupervisorConfig
from tensorpool.supervisor.config import SupervisorSection
from tensorpool.supervisor.supervisor import Supervisor
from tensorpool.wire.control import QosConsumer, QosProducer
from tests.support.bridge_rig import BridgeProcess, Host, Reception, serving_host
from tests.support.bridge_sender import Link
from tests.support.messages import consumer_qos
from tests.support.wire_producer import new_stream_id

PHANTOM = 4_711


@pytest.fixture(scope="module")
def host(shared_media_driver: aeron.MediaDriver) -> Iterator[Host]:
    with serving_host(shared_media_driver.aeron_dir) as host:
        yield host


@pytest.fixture(scope="module")
def link() -> Link:
    return Link.unused()


def with_control(stream_id: int, **keys: Any) -> dict[str, Any]:
    return {"mapping": {"source_control_stream_id": 1000, "dest_control_stream_id": stream_id}, **keys}


@pytest.mark.spec("BRG-10-20")
@pytest.mark.parametrize("profile", ["small", "cameras"])
def test_a_destination_with_another_profile_than_the_mappings_is_logged(host: Host, link: Link, profile: str) -> None:
    """Once, with what was expected and what was found; a destination that has the profile is not."""
    known = host.config_path.read_text(encoding="utf-8")
    cameras = "[profiles.cameras]\nheader_nslots = 16\npayload_pools = [{ pool_id = 1, stride_bytes = 1048576 }]\n"
    path = host.folder / "driver_with_cameras.toml"
    path.write_text(f"{known}\n{cameras}", encoding="utf-8")
    runs = partial(BridgeProcess, log_level="info")
    mapping = {"profile": profile}
    with Reception(host, link=link.again(), runs=runs, mapping=mapping, driver_config=str(path)) as reception:
        reception.bridge.wait_for("destination")
        if profile == "cameras":
            logged = reception.bridge.wait_for("destination_has_another_profile")
            assert (logged["level"], logged["profile"]) == ("warning", "cameras")
            assert logged["expected"] == "16 slots of up to 1048576 bytes"
            assert logged["found"] == "8 slots of up to 4096 bytes"
        reception.bridge.wait_for("ready")
        events = [event["event"] for event in reception.bridge.events]
        assert events.count("destination_has_another_profile") == (profile == "cameras")
        reception.wait_until(lambda: reception.sender.is_connected(*reception.link), "it listens")
        reception.wait_through(announces=True)
        reception.sender.new_epoch()
        reception.wait_through(announces=True)  # with memory of another epoch
        code, rest = reception.bridge._process.terminate()
    assert code == 0
    assert '"destination"' in rest
    assert "destination_has_another_profile" not in rest


def test_what_nobody_receives_is_not_counted_as_forwarded(host: Host, link: Link) -> None:
    """Progress and QoS of a mapping whose control stream has no subscriber are drops."""
    keys = with_control(new_stream_id(), forward_progress=True, forward_qos=True)
    with Reception(host, link=link.again(), **keys) as reception:
        reception.meet()
        reception.sender.progress(reception.sender.next_seq + 5)
        reception.sender.qos()
        for name in ("progress.not_connected", "qos.not_connected"):
            reception.wait_until(lambda name=name: reception.drops()[name] == 1, f"{name} is counted")
        counts = reception.bridge.counts()
        assert not [name for name in counts if name in ("progress_forwarded", "qos_forwarded")]


def test_the_other_hosts_consumers_are_no_consumers_here(host: Host, link: Link) -> None:
    """A foreign sender may forward QoS of its consumers: it is refused, or a supervisor would look for them here."""
    qos = host.place.endpoints.qos
    config = SupervisorConfig.of(host.config)
    section = SupervisorSection(instance_id="far", http="")
    with (
        Supervisor(msgspec.structs.replace(config, supervisor=section), aeron_dir=host.aeron_dir) as supervisor,
        Reception(host, link=link.again(), **with_control(qos[1], forward_qos=True)) as reception,
    ):
        reception.meet()
        since = reception.now
        phantom = consumer_qos(reception.sender.stream_id, consumer_id=PHANTOM)
        reception.sender.send(phantom, reception.link.control)
        reception.sender.qos(current_seq=2**40)
        reception.wait_for(QosProducer, since, stream_id=reception.dest_stream_id, current_seq=2**40)
        assert reception.drops()["qos.consumer"] == 1
        assert not reception.consumer.received(QosConsumer, since, consumer_id=PHANTOM)

        reception.consumer.say_qos(reception.dest_stream_id)

        def consumers() -> set[int]:
            return {it.consumer_id for it in supervisor.observer.snapshot().consumers}

        reception.wait_until(lambda: reception.consumer.consumer_id in consumers(), "it has read one of this host")
        assert PHANTOM not in consumers()
