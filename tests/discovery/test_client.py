# SPDX-License-Identifier: Apache-2.0
"""Clients that ask: what they get, where they attach, and what they refuse to believe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.discovery.config import RegistryConfig
from tensorpool.discovery.registry import Registry
from tensorpool.driver import Driver, DriverConfig
from tests.support.patience import PATIENT
from tests.support.processes import private_directory, wait_until

IPC = "aeron:ipc?term-length=4m"
PROFILE = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
REGISTRY_STREAM_ID = 64_900


class Site:
    """Two drivers on one media driver, a registry for both, and clients of the first."""

    def __init__(self, folder: Path) -> None:
        self.media_driver = aeron.MediaDriver(str(folder / "aeron"))
        self.aeron_dir = self.media_driver.aeron_dir
        self.configs = {name: self._config(folder, name, 64_000 + 100 * index) for index, name in enumerate("ab")}
        self.drivers = {name: Driver(config, aeron_dir=self.aeron_dir) for name, config in self.configs.items()}
        entries = [
            {
                "instance_id": name,
                "control_channel": IPC,
                "control_stream_id": config.driver.control_stream_id,
                "metadata_channel": IPC,
                "metadata_stream_id": config.driver.metadata_stream_id,
                "announce_period_ms": 300,
            }
            for name, config in self.configs.items()
        ]
        section = {"stream_id": REGISTRY_STREAM_ID, "drivers": entries}
        self.registry = Registry(
            RegistryConfig.load(environ={}, overrides={"discovery": section}), aeron_dir=self.aeron_dir
        )

    def _config(self, folder: Path, name: str, first: int) -> DriverConfig:
        return DriverConfig.load(
            environ=PATIENT,
            overrides={
                "driver.instance_id": name,
                "driver.control_stream_id": first,
                "driver.metadata_stream_id": first + 1,
                "shm.base_dir": str(folder / "shm"),
                "shm.namespace": name,
                "policies.announce_period_ms": 300,
                "profiles.default": PROFILE,
                "discovery.registries": [{"channel": "aeron:ipc?term-length=1m", "stream_id": REGISTRY_STREAM_ID}],
            },
        )

    def connect(self, name: str, **changed: Any) -> tp.Client:
        return tp.connect(self.aeron_dir, config=self.configs[name], **changed)

    def close(self) -> None:
        self.registry.close()
        for driver in self.drivers.values():
            driver.close()
        self.media_driver.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with private_directory() as folder:
        site = Site(folder)
        yield site
        site.close()


@pytest.fixture
def client(site: Site) -> Iterator[tp.Client]:
    with site.connect("a") as client:
        yield client


@pytest.fixture
def other(site: Site) -> Iterator[tp.Client]:
    """A client of driver b."""
    with site.connect("b") as client:
        yield client


def test_what_is_found_says_everything_and_comes_once(client: tp.Client) -> None:
    """The driver's provider and the registry tell of the same stream: one result, by filters of every kind."""
    with client.producer("once", create=True) as producer:
        producer.set_metadata({}, tags=["t1", "t2"])
        wait_until(lambda: client.discover("once", tags=["t2", "t1"]), "the stream is known")
        (stream,) = client.discover("once")
        assert (stream.stream_id, stream.producer_id) == (producer.stream_id, producer.producer_id)
        assert (stream.driver_instance_id, stream.data_source_name) == ("a", "once")
        assert (stream.header_nslots, stream.header_slot_bytes, stream.max_dims) == (8, 256, 8)
        assert [pool.stride_bytes for pool in stream.payload_pools] == [4096]
        assert stream.control == client.config.driver.control
        assert client.discover(stream_id=stream.stream_id, producer_id=stream.producer_id) == [stream]
        assert client.discover("once", driver_instance_id="b") == client.discover("Once") == []
        assert client.discover("once", tags=["T1"]) == []


def test_a_stream_of_another_driver_is_attached_there(client: tp.Client, other: tp.Client) -> None:
    """By name alone: the answer says where; frames flow."""
    with other.producer("far", create=True) as producer:
        with client.consumer("far", timeout=20) as consumer:
            producer.wait_for_consumers()
            producer.publish(np.arange(5, dtype=np.uint8))
            frame = consumer.poll(timeout=60)
            assert frame is not None
            assert frame.array.tolist() == [0, 1, 2, 3, 4]
        with client.watch("far", timeout=20) as watch:
            assert watch.stream_id == producer.stream_id


def test_a_driver_that_is_not_there_is_never_replaced_by_another(client: tp.Client) -> None:
    """A name or an id that lives here is refused, for consumers and producers, when another driver was chosen."""
    with client.producer("chosen", create=True) as producer:
        wait_until(lambda: client.discover("chosen"), "the stream is known")
        for stream in ("chosen", producer.stream_id):
            with pytest.raises(tp.TensorPoolError, match="at driver 'no-such'"):
                client.consumer(stream, driver_instance_id="no-such", timeout=0.7)
        with pytest.raises(tp.TensorPoolError, match="'no-such'"):
            client.producer("chosen too", create=True, driver_instance_id="no-such", timeout=0.7)
        with client.consumer("chosen", driver_instance_id="a", timeout=20) as consumer:
            assert consumer.stream_id == producer.stream_id


def test_a_name_in_the_drivers_configuration_is_found_by_clients_that_have_none() -> None:
    """Before a producer came, by a producer, and after it left."""
    streams = {"volume": {"stream_id": 12_345, "profile": "default"}}
    overrides = {"streams": streams, "policies.announce_period_ms": 200, "profiles.default": PROFILE}
    with tp.local(overrides=overrides) as pool:
        bare = DriverConfig.load(environ=PATIENT, overrides={"shm.base_dir": pool.config.shm.base_dir})
        with tp.connect(pool.aeron_dir, config=bare) as client:
            with client.consumer("volume", timeout=20) as consumer, client.producer("volume", timeout=20) as producer:
                assert consumer.stream_id == producer.stream_id == 12_345
            wait_until(lambda: [it.producer_id for it in client.discover("volume")] == [0], "the producer is gone")


def test_a_name_at_two_drivers_is_ambiguous_until_one_is_chosen(client: tp.Client, other: tp.Client) -> None:
    """The error lists the candidates."""
    with client.producer("twice", create=True) as first, other.producer("twice", create=True) as second:
        wait_until(lambda: len(client.discover("twice")) == 2, "both are known")
        with pytest.raises(tp.TensorPoolError, match="ambiguous") as caught:
            client.consumer("twice")
        for name, producer in (("a", first), ("b", second)):
            assert f"stream {producer.stream_id} of driver {name}" in str(caught.value)
        assert "driver_instance_id" in str(caught.value)
        for name, producer in (("a", first), ("b", second)):
            with client.consumer("twice", driver_instance_id=name) as consumer:
                producer.publish(np.full(3, ord(name), np.uint8))
                frame = consumer.poll(timeout=60) or consumer.latest()
                assert frame is not None
                assert frame.array.tolist() == [ord(name)] * 3


def test_an_id_at_another_driver_is_attached_there(client: tp.Client, other: tp.Client) -> None:
    """Ids are a driver's own."""
    with other.producer("by id", create=True) as producer:
        wait_until(lambda: client.discover("by id"), "it is known")
        with client.consumer(producer.stream_id, driver_instance_id="b") as consumer:
            assert consumer.stream_id == producer.stream_id
        with pytest.raises(tp.TensorPoolError, match=f"no stream {producer.stream_id} at driver 'a'"):
            client.consumer(producer.stream_id, driver_instance_id="a", timeout=1.5)


def test_a_producer_may_choose_its_driver(client: tp.Client, other: tp.Client) -> None:
    """Once something of that driver is known; a driver that is not is an error."""
    with other.producer("known", create=True):
        wait_until(lambda: client.discover(driver_instance_id="b"), "driver b is known")
        with client.producer("chosen", create=True, driver_instance_id="b") as producer:
            wait_until(lambda: client.discover(producer_id=producer.producer_id), "it is known")
            (stream,) = client.discover(producer_id=producer.producer_id)
            assert (stream.driver_instance_id, stream.stream_id) == ("b", producer.stream_id)
    with pytest.raises(tp.TensorPoolError, match="no stream of a driver 'zzz'"):
        client.producer("chosen", create=True, driver_instance_id="zzz")


def test_a_producer_goes_to_the_stream_that_has_its_name(site: Site, client: tp.Client) -> None:
    """Not beside it: the second of a name is refused."""
    with client.producer("mine", create=True) as producer, site.connect("a") as second:
        wait_until(lambda: second.discover("mine"), "it is known")
        with pytest.raises(tp.AttachRefused) as caught:
            second.producer("mine", create=True, timeout=1.5)
        assert str(producer.producer_id) in caught.value.words


def test_a_consumer_waits_for_its_name_at_whichever_driver(client: tp.Client, other: tp.Client) -> None:
    """As long as its timeout; then the error says what to do."""
    with pytest.raises(tp.TensorPoolError, match=r"no producer announces the name 'absent'.*tensorpool ls"):
        client.consumer("absent", timeout=1.5)


def test_without_discovery_names_come_from_announces(site: Site) -> None:
    """As before there was any."""
    config = DriverConfig.load(
        environ=PATIENT,
        overrides={
            "driver.control_stream_id": 64_000,
            "driver.metadata_stream_id": 64_001,
            "shm.base_dir": site.configs["a"].shm.base_dir,
            "policies.announce_period_ms": 300,
            "discovery.enabled": "false",
        },
    )
    with tp.connect(site.aeron_dir, config=config) as client, client.producer("plain", create=True) as producer:
        with client.consumer("plain") as consumer:
            assert consumer.stream_id == producer.stream_id
        with pytest.raises(tp.ConfigError, match=r"discovery\.enabled"):
            client.discover()


def test_a_client_that_is_turned_by_hand_asks_too(site: Site, other: tp.Client) -> None:
    """Also of another driver."""
    with (
        other.producer("by hand", create=True) as producer,
        site.connect("a", conductor="invoked") as client,
        client.consumer("by hand", timeout=20) as consumer,
    ):
        assert consumer.stream_id == producer.stream_id
        client.invoke()


def test_an_error_names_the_providers_when_none_answers(shared_media_driver: aeron.MediaDriver) -> None:
    """Within the time that was given."""
    config = DriverConfig.load(environ={}, overrides={"driver.control_stream_id": 64_800})
    with (
        tp.connect(shared_media_driver.aeron_dir, config=config) as client,
        pytest.raises(tp.DriverUnreachable, match="stream 64800"),
    ):
        client.discover(timeout=0.3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 257},
        {"tags": "lab1"},
        {"tags": [""]},
        {"tags": ["é"]},
        {"tags": [5]},
        {"stream_id": -1},
        {"producer_id": 2**32 - 1},
        {"data_source_id": 1.5},
        {"timeout": 0},
    ],
)
def test_what_no_request_can_carry_is_refused(client: tp.Client, wrong: dict[str, Any]) -> None:
    """Before anything is sent."""
    with pytest.raises(tp.LocalProtocolError):
        client.discover(**wrong)
