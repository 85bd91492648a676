# SPDX-License-Identifier: Apache-2.0
"""What a supervisor does, seen from outside: a process of its own, peers made of the codec and Aeron, HTTP.

Wire §10.1.3, §10.5, §15.14; Driver Model §4.13.
"""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from tensorpool import aeron
from tensorpool.cli.main import group
from tensorpool.wire.control import (
    Attribute,
    ConsumerConfig,
    DataSourceAnnounce,
    DataSourceMeta,
    Mode,
    QosProducer,
)
from tensorpool.wire.driver import ShmDriverShutdownRequest, ShutdownReason
from tensorpool.wire.event import EventMessage, Format
from tests.support.driver_client import new_client_id
from tests.support.messages import consumer_qos, hello
from tests.support.processes import Process, private_directory, wait_until
from tests.support.toml import toml_text
from tests.support.wire_producer import WireProducer

TOKEN = "s3cret"
REDIRECTED = 4_242_424
PERIOD_MS = 500
CONTROL, STATUS = ("aeron:ipc?term-length=4m", 61_400), ("aeron:ipc?term-length=4m", 61_401)


class Desk(NamedTuple):
    """A supervisor, and a stream with its driver for it to watch."""

    peer: WireProducer
    process: Process
    address: str
    transport: aeron.Client

    def view(self) -> dict[str, Any]:
        with closing(http.client.HTTPConnection(self.address, timeout=30)) as connection:
            connection.request("GET", "/view")
            return dict(json.loads(connection.getresponse().read()))

    def stream(self) -> dict[str, Any]:
        found = [it for it in self.view()["streams"] if it["stream_id"] == self.peer.stream_id]
        return found[0] if found else {}

    def wait_stream(self, fits: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def is_so() -> bool:
            found.append(self.stream())
            return bool(found[-1]) and bool(fits(found[-1]))

        wait_until(is_so, what)
        return found[-1]

    def report(self, consumer_id: int, behind: int) -> None:
        """A consumer that says hello and how far it is."""
        seq = 10_000
        self.peer.say(QosProducer, current_seq=seq)
        self.peer.send(hello(self.peer.stream_id, consumer_id))
        losses = {"last_seq_seen": seq - behind, "drops_gap": 2, "drops_late": 1}
        qos = consumer_qos(self.peer.stream_id, consumer_id, epoch=self.peer.epoch, **losses)
        self.peer.send(qos, self.peer.endpoints.qos)

    def wait_for_override(self, consumer_id: int, behind: int, **fields: Any) -> ConsumerConfig:
        since = self.peer.now

        def is_sent() -> bool:
            self.report(consumer_id, behind)
            return bool(self.peer.received(ConsumerConfig, since, consumer_id=consumer_id, **fields))

        wait_until(is_sent, f"consumer {consumer_id} gets an override")
        return self.peer.received(ConsumerConfig, since, consumer_id=consumer_id, **fields)[0].message


@pytest.fixture(scope="module")
def desk(shared_media_driver: aeron.MediaDriver) -> Iterator[Desk]:
    aeron_dir = shared_media_driver.aeron_dir
    with private_directory() as folder, WireProducer(folder / "regions", aeron_dir) as peer:
        path = folder / "supervisor.toml"
        path.write_text(configuration(peer))
        arguments = ["supervisor", "--config", str(path), "--aeron-dir", aeron_dir, "--json", "--log-level", "error"]
        with (
            Process("-m", "tensorpool", *arguments) as process,
            closing(aeron.connect(aeron_dir)) as transport,
        ):
            ready = json.loads(process.read_line())
            assert ready["event"] == "ready"
            yield Desk(peer, process, ready["http"], transport)


def configuration(peer: WireProducer) -> str:
    endpoints = peer.endpoints
    return f"""
        [supervisor]
        instance_id = "desk"
        http = "127.0.0.1:0"
        [[supervisor.rules]]
        consumer_ids = [{REDIRECTED}]
        when_lag_over = 100
        for_ms = 0
        fallback_uri = "aeron:udp?endpoint=10.0.0.9:40400"
        mode = "STREAM"
        [[supervisor.rules]]
        stream = "{peer.stream_id}"
        when_lag_over = 100
        for_ms = 0
        [control]
        control_stream_id = {CONTROL[1]}
        status_stream_id = {STATUS[1]}
        [driver]
        control_stream_id = {endpoints.control[1]}
        qos_stream_id = {endpoints.qos[1]}
        metadata_stream_id = {endpoints.metadata[1]}
        descriptor_stream_id = {endpoints.descriptor[1]}
        [shm]
        base_dir = "{peer.folder}"
        [policies]
        announce_period_ms = {PERIOD_MS}
        shutdown_token = "{TOKEN}"
    """


@pytest.mark.spec("WIRE-10.5-01")
def test_announces_metadata_qos_and_health_make_one_view(desk: Desk) -> None:
    """Each message adds what it says, whichever process sends it."""
    peer, consumer_id = desk.peer, new_client_id()
    status = desk.transport.add_publication(*STATUS, exclusive=True)
    value = {"service": "recorder", "instance": "lab1", "pid": 77, "state": "paused", "version": "9"}
    alive = EventMessage(
        timestamp_ns=0,
        correlation_id=0,
        format=Format.STRING,
        tag="service:recorder:lab1",
        key="alive",
        value=msgspec.json.encode(value),
    )

    def is_complete() -> bool:
        tags = Attribute(key="tags", format="text/plain", value=b"lab1, day")
        peer.say(DataSourceAnnounce, name="conformance/camera")
        peer.say(DataSourceMeta, attributes=(tags,))
        desk.report(consumer_id, behind=7)
        status.offer(alive.encode())
        view = desk.view()
        return (
            any(it["name"] == "conformance/camera" and it["tags"] and it["seq"] == 10_000 for it in view["streams"])
            and any(it["consumer_id"] == consumer_id and it["lag"] is not None for it in view["consumers"])
            and any(it["tag"] == "service:recorder:lab1" for it in view["services"])
        )

    wait_until(is_complete, "everything is in the view")
    view = desk.view()
    stream = desk.stream()
    assert (stream["epoch"], stream["producer_id"], stream["nslots"]) == (peer.epoch, peer.producer_id, peer.nslots)
    assert (stream["tags"], stream["layout_version"]) == (["lab1", "day"], 1)
    (consumer,) = [it for it in view["consumers"] if it["consumer_id"] == consumer_id]
    assert (consumer["lag"], consumer["drops_gap"], consumer["drops_late"], consumer["mode"]) == (7, 2, 1, "STREAM")
    (service,) = [it for it in view["services"] if it["tag"] == "service:recorder:lab1"]
    assert (service["state"], service["pid"], service["is_stale"]) == ("paused", 77, False)
    assert not [
        received
        for received in peer.transcript
        if type(received.message).__name__.startswith(("ShmAttach", "ShmLease"))
    ]


def test_changes_are_printed_line_by_line(desk: Desk) -> None:
    """With --json: the time of day, the kind, and a text."""
    change: dict[str, Any] = {}
    while change.get("stream_id") != desk.peer.stream_id:
        change = json.loads(desk.process.read_line())
        assert change["event"] == "change"
    assert (change["kind"], change["text"]) == ("stream appeared", f"stream {desk.peer.stream_id}: is there")
    assert abs(change["time_ns"] - time.time_ns()) < 600 * 1_000_000_000


@pytest.mark.spec("WIRE-10.1.3-05", "WIRE-10.1.3-12", "WIRE-10.5-02")
def test_a_supervisor_forces_a_mode_or_redirects_to_a_bridge(desk: Desk) -> None:
    """ConsumerConfig, for the consumer that lags and no other."""
    fine = new_client_id()
    limited = desk.wait_for_override(new_client_id(), behind=500)
    assert (limited.stream_id, limited.use_shm, limited.mode) == (desk.peer.stream_id, True, Mode.RATE_LIMITED)
    assert (limited.payload_fallback_uri, limited.descriptor_channel, limited.descriptor_stream_id) == ("", "", 0)
    desk.report(fine, behind=3)
    redirected = desk.wait_for_override(REDIRECTED, behind=500)
    assert (redirected.use_shm, redirected.mode) == (False, Mode.STREAM)
    assert redirected.payload_fallback_uri == "aeron:udp?endpoint=10.0.0.9:40400"
    assert desk.peer.received(ConsumerConfig, consumer_id=fine) == []


@pytest.mark.spec("WIRE-10.1.3-05")
@pytest.mark.parametrize(
    ("uri", "is_fine"),
    [
        ("aeron:udp?endpoint=10.0.0.9:40400", True),
        ("aeron:ipc", True),
        ("bridge://lab-2", True),
        ("bridge://", False),
        ("aeron:udp", False),
        ("http://10.0.0.9", False),
        ("10.0.0.9:40400", False),
    ],
)
def test_a_fallback_is_an_aeron_channel_or_a_bridge(tmp_path: Path, uri: str, is_fine: bool) -> None:
    """Nothing else can be configured, and so nothing else is sent to a consumer."""
    path = tmp_path / "supervisor.toml"
    path.write_text(toml_text({"supervisor": {"rules": [{"when_lag_over": 100, "fallback_uri": uri}]}}))
    result = CliRunner().invoke(group, ["supervisor", "--check", "--json", "--config", str(path)])
    assert (result.exit_code == 0) is is_fine, result.output
    assert is_fine or "fallback_uri" in str(result.exception)


@pytest.mark.spec("WIRE-15.14-01", "WIRE-15.14-06")
def test_memory_that_no_driver_refreshes_is_dead_after_four_periods_until_a_new_epoch(desk: Desk) -> None:
    """However often it is announced: no sooner, and what is looked at afterwards is the new epoch's file."""
    peer = desk.peer
    desk.wait_stream(lambda it: it["state"] != "stale" and it["activity_age_ns"] is not None, "it is alive")
    peer.breathes = False
    stopped_ns = time.monotonic_ns()
    try:
        stale = desk.wait_stream(lambda it: it["state"] == "stale", "it is dead")
        assert stale["activity_age_ns"] > 4 * PERIOD_MS * 1_000_000
        assert stale["announced_age_ns"] < 4 * PERIOD_MS * 1_000_000
        assert time.monotonic_ns() - stopped_ns >= 3 * PERIOD_MS * 1_000_000
        before = peer.epoch
        peer.new_epoch()
    finally:
        peer.breathes = True
    alive = desk.wait_stream(lambda it: it["state"] != "stale" and it["activity_age_ns"] is not None, "it is back")
    assert alive["epoch"] == before + 1
    kinds = [it["kind"] for it in desk.view()["changes"] if it["stream_id"] == peer.stream_id]
    assert kinds.index("stream stale") < kinds.index("epoch changed")


@pytest.mark.spec("WIRE-15.14-06")
def test_the_liveness_timeout_is_three_to_five_announce_periods(tmp_path: Path) -> None:
    """As the configuration in effect says, and nothing else can be set."""

    def dump(*settings: str) -> tuple[int, str]:
        arguments = ["supervisor", "--check", "--json", *(f"--set={setting}" for setting in settings)]
        result = CliRunner().invoke(group, arguments)
        return result.exit_code, f"{result.output}{result.exception}"

    code, output = dump()
    assert code == 0
    assert 3 <= json.loads(output.removesuffix("None"))["settings"]["supervisor.stale_periods"] <= 5
    for periods, is_fine in ((2, False), (3, True), (5, True), (6, False)):
        code, output = dump(f"supervisor.stale_periods={periods}")
        assert (code == 0) is is_fine
        assert is_fine or "from 3 to 5" in output


@pytest.mark.spec("DRV-4.13-04")
def test_a_shutdown_request_carries_the_configured_token(desk: Desk) -> None:
    """Golden bytes: header, correlation id, reason, the token with its length."""
    peer = desk.peer
    since = peer.now
    commands = desk.transport.add_publication(*CONTROL)
    wait_until(lambda: commands.has_room, "the supervisor hears commands")
    command = EventMessage(
        timestamp_ns=0,
        correlation_id=4711,
        format=Format.STRING,
        tag="service:supervisor:desk",
        key="shutdown-driver",
        value=b"ADMIN",
    )

    def is_asked() -> bool:
        commands.offer(command.encode())
        return bool(peer.received(ShmDriverShutdownRequest, since))

    wait_until(is_asked, "the driver is asked to end")
    received = peer.wait_for(ShmDriverShutdownRequest, since)
    assert received.data[:8] == struct.pack("<HHHH", 9, 8, 901, 1)
    assert received.data[16] == ShutdownReason.ADMIN
    assert received.data[17:27] == struct.pack("<I", len(TOKEN)) + TOKEN.encode()
    assert received.message.token == TOKEN
