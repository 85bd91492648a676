# SPDX-License-Identifier: Apache-2.0
"""The service control plane as a peer sees it that knows the codec and Aeron alone: a driver's process, and services
with typed commands in this one. Service Control §4-§7."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.control import Commander, ControlConfig, Ref, Service
from tensorpool.wire import decode
from tensorpool.wire.driver import ShmDriverShutdown
from tensorpool.wire.event import EventMessage, Format
from tests.control.peer import IPC, NULL_32, NULL_64, EventPeer, new_endpoints, raw_event
from tests.support.disc_client import unused_udp_channel
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.processes import private_directory, wait_until

DRIVER = "service:driver:driver-01"
TAG = "service:recorder:lab1"
CONTROL, STATUS = (IPC, 1400), (IPC, 1401)  # what a deployment has that says nothing
REF: dict[str, Any] = {"ref_stream_id": 10_000, "ref_epoch": 7, "ref_seq": 8}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """A driver as an operator starts it, with its own media driver."""
    with private_directory() as folder:
        deployment = Deployment(folder, str(folder / "aeron"))
        with deployment.start() as process:
            wait_until(lambda: aeron.is_driver_active(deployment.aeron_dir), "the media driver is there")
            yield deployment
            process.terminate()


@pytest.fixture
def peer(deployment: Deployment) -> Iterator[EventPeer]:
    with EventPeer(deployment.aeron_dir, control=CONTROL, status=STATUS) as peer:
        peer.hear("alive")
        yield peer


class Recorder:
    """A service with typed commands on the test's own thread, and what it ran."""

    def __init__(self, aeron_dir: str, **settings: Any) -> None:
        endpoints = new_endpoints() | settings
        self.config = ControlConfig(**endpoints)
        self.ran: list[tuple[str, object]] = []
        self.service = Service("recorder", "lab1", config=self.config)
        self._client = aeron.connect(aeron_dir)

        @self.service.command("mark")
        def mark(note: str) -> None:
            self.ran.append(("mark", note))

        @self.service.command("show")
        def show(frame: Ref) -> Ref:
            self.ran.append(("show", frame))
            return frame

        @self.service.command("go")
        def go() -> None:
            self.ran.append(("go", None))

        self.service.bind(self._client)

    def peer(self, **more: Any) -> EventPeer:
        config = self.config
        control = config.control_channel, config.control_stream_id
        status = config.status_channel, config.status_stream_id
        return EventPeer(
            self._client.dir, control=control, status=status, schema_id=config.schema_id, turn=self.service.invoke
        )

    def close(self) -> None:
        self.service.unbind()
        self._client.close()


@pytest.fixture
def recorder(deployment: Deployment) -> Iterator[Recorder]:
    recorder = Recorder(deployment.aeron_dir)
    yield recorder
    recorder.close()


@pytest.mark.spec("CTL-4-01", "CTL-6-01", "CTL-5.2-05")
def test_a_driver_with_nothing_configured_hears_commands_and_echoes_them(peer: EventPeer) -> None:
    """Byte for byte, whatever correlation id or trace id a peer chose, before the result that is another message."""
    for correlation_id in (0, -1, 2**63 - 1, 4711):
        sent = peer.command(DRIVER, "ping", correlation_id=correlation_id)
        answer = peer.answer_to(sent)
        assert peer.received.index(sent) < peer.events.index(answer)
        assert (answer.tag, answer.value) == (DRIVER, b"pong")


@pytest.mark.spec("CTL-4-02", "CTL-7-01")
def test_a_driver_publishes_its_health_under_its_tag(peer: EventPeer, deployment: Deployment) -> None:
    """service:<name>:<instance>, in an event of its own on the status stream."""
    alive = peer.hear("alive")
    assert alive.tag == DRIVER
    found = json.loads(alive.value)
    assert (found["service"], found["instance"], found["state"]) == ("driver", "driver-01", "running")
    assert found["pid"] > 0
    assert found["version"]


@pytest.mark.spec("CTL-4-03")
def test_the_control_plane_attaches_no_client(peer: EventPeer) -> None:
    """No event gives a lease or says where memory lies; a command that asks for it is no command."""
    for key in ("attach", "ShmAttachRequest", "lease", "detach", "revoke"):
        sent = peer.command(DRIVER, key, b"10000", Format.STRING)
        peer.answer_to(sent, "rejected")
        assert not peer.is_echoed(sent)
    status = json.loads(peer.answer_to(peer.command(DRIVER, "status")).value)
    assert (status["streams"], status["leases"]) == (1, 0)
    assert not [data for data in peer.received if b"shm:file" in data or b".pool" in data or b"header.ring" in data]


@pytest.mark.spec("CTL-5-02", "CTL-5-03")
def test_other_schemas_templates_and_tags_are_passed_over(peer: EventPeer) -> None:
    """The header decides first, then the exact bytes of the tag: a name does not address its instances (H7)."""
    before = json.loads(peer.answer_to(peer.command(DRIVER, "status")).value)["control"]
    tag = DRIVER.encode()
    foreign = [raw_event(header=(40, 1, schema, 1), tag=tag, key=b"ping") for schema in (900, 901, 910, 906)]
    foreign.append(raw_event(header=(40, 2, 905, 1), tag=tag, key=b"ping"))
    tags = (b"service:driver", b"service:driver:driver-02", tag.upper(), tag + b" ", tag[:-1], tag + b"\x00", b"")
    others = [raw_event(tag=other, key=b"ping", correlation_id=9) for other in tags]
    for data in (*foreign, *others):
        peer.say(data)
    after = json.loads(peer.answer_to(peer.command(DRIVER, "status")).value)["control"]
    assert after["other_schema"] - before["other_schema"] == len(foreign)
    assert after["other_tag"] - before["other_tag"] == len(others)
    assert after["accepted"] - before["accepted"] == 1
    assert not set(peer.received) & {*foreign, *others}


@pytest.mark.spec("CTL-5-02")
def test_a_deployment_may_number_the_schema_otherwise(deployment: Deployment) -> None:
    """Then events of the usual number are another schema's."""
    recorder = Recorder(deployment.aeron_dir, schema_id=1234)
    try:
        with recorder.peer() as peer:
            usual = peer.say(raw_event(tag=TAG.encode(), key=b"go"))
            sent = peer.command(TAG, "go")
            peer.answer_to(sent)
            assert sent[4:6] == (1234).to_bytes(2, "little")
            assert not peer.is_echoed(usual)
            assert recorder.ran == [("go", None)]
    finally:
        recorder.close()


@pytest.mark.spec("CTL-5-04")
def test_messages_to_others_allocate_nothing(recorder: Recorder) -> None:
    """Not an object for each of hundreds of messages, and none of their bytes are copied.

    Other threads of this process allocate now and then: not in every round.
    """
    service = recorder.service
    with recorder.peer() as peer:
        peer.answer_to(peer.command(TAG, "go"))
        peer.turn = lambda: None  # from here on nothing is read
        rounds = [_cost_of_reading(600, service, peer) for _ in range(5)]
    assert min(peak for peak, _ in rounds) < 1000  # less than the bytes of a single message
    assert min(blocks for _, blocks in rounds) < 50


def _cost_of_reading(count: int, service: Service, peer: EventPeer) -> tuple[int, int]:
    """Python's memory at its peak, and the objects that stay, while a service receives messages for another one."""
    for number in range(count):
        peer.say(raw_event(tag=b"service:other", key=b"k", value=bytes(1000), correlation_id=number))
    counts = service.counts
    service.invoke()
    tracemalloc.start()
    service.invoke()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    blocks = sys.getallocatedblocks()
    while service.invoke():
        pass
    blocks = sys.getallocatedblocks() - blocks
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert service.counts["other_tag"] - counts["other_tag"] == count
    return peak - before, blocks


@pytest.mark.spec("CTL-5-01")
@pytest.mark.parametrize("media", ["ipc", "udp"])
def test_events_travel_over_ipc_and_udp(deployment: Deployment, media: str) -> None:
    """As configured, SBE encoded both ways."""
    channels = {} if media == "ipc" else {name: unused_udp_channel() for name in ("control_channel", "status_channel")}
    recorder = Recorder(deployment.aeron_dir, allow_remote=("mark",), **channels)
    try:
        with recorder.peer() as peer:
            peer.hear("alive")  # the status stream is connected
            sent = peer.command(TAG, "mark", b"here", Format.STRING)
            answer = peer.answer_to(sent)
            assert peer.is_echoed(sent)
            assert isinstance(decode(answer.encode()), EventMessage)
            assert recorder.ran == [("mark", "here")]
    finally:
        recorder.close()


@pytest.mark.spec("CTL-5.1-01")
def test_a_command_with_additional_fields_is_accepted_and_echoed_whole(recorder: Recorder) -> None:
    """The echo has the fields that we do not know, too."""
    with recorder.peer() as peer:
        sent = raw_event(header=(48, 1, 905, 1), more=b"\x01" * 8, tag=TAG.encode(), key=b"go", correlation_id=3)
        peer.say(sent)
        peer.wait_for_echo(sent)
        assert recorder.ran == [("go", None)]


@pytest.mark.spec("CTL-5.1-02")
def test_every_format_is_distinguished(recorder: Recorder) -> None:
    """A command for text accepts the one format that is text, by its number."""
    sizes = {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4, 7: 8, 8: 8, 9: 4, 10: 8, 11: 1, 12: 4, 13: 4, 14: 1, 15: 0}
    with recorder.peer() as peer:
        for number, size in sizes.items():
            ref = (1, 2, 3) if number == 15 else (NULL_32, NULL_64, NULL_64)
            value = b"text" if number in (12, 13) else bytes(size)
            data = raw_event(tag=TAG.encode(), key=b"mark", format=number, value=value, ref=ref, correlation_id=number)
            peer.say(data)
            if number == 12:
                peer.hear("result:mark", number)
            else:
                reason = peer.hear("rejected:mark", number)
                assert f"this is {Format(number).name}" in reason.value.decode()
        peer.say(raw_event(tag=TAG.encode(), key=b"mark", format=16, correlation_id=16))  # no format at all: dropped
        peer.answer_to(peer.command(TAG, "go"))
        assert not [one for one in peer.events if one.correlation_id == 16]
    assert recorder.ran == [("mark", "text"), ("go", None)]


@pytest.mark.spec("CTL-5.1-03", "CTL-5.1-04")
def test_what_a_service_says_has_the_layout_of_the_specification(recorder: Recorder) -> None:
    """Template 1 with a block of 40, absent references all ones, then tag, key and value."""
    with recorder.peer() as peer:
        sent = peer.command(TAG, "go", correlation_id=0x0102030405060708)
        answer = peer.answer_to(sent)
        data = next(one for one in peer.received if peer.read(one) == answer)
    expected = raw_event(tag=TAG.encode(), key=b"result:go", correlation_id=0x0102030405060708)
    assert data[:8] == expected[:8]
    assert data[16:] == expected[16:]  # all but the timestamp


@pytest.mark.spec("CTL-5.2-01", "CTL-5.2-02")
def test_references_are_in_their_fields_and_not_in_the_value(recorder: Recorder) -> None:
    """In both directions; a command that repeats one in its value is not accepted."""
    with recorder.peer() as peer:
        sent = peer.command(TAG, "show", format=Format.REF, **REF)
        answer = peer.answer_to(sent)
        assert (answer.format, answer.value) == (Format.REF, b"")
        assert (answer.ref_stream_id, answer.ref_epoch, answer.ref_seq) == (10_000, 7, 8)
        again = peer.command(TAG, "show", b"10000/7/8", Format.REF, **REF)
        assert b"must not repeat" in peer.answer_to(again, "rejected").value
        partly = peer.command(TAG, "show", format=Format.REF, ref_stream_id=10_000, ref_epoch=7)
        assert b"without stream id, epoch and seq" in peer.answer_to(partly, "rejected").value
        assert not peer.is_echoed(again)
    assert recorder.ran == [("show", Ref(10_000, 7, 8))]


@pytest.mark.spec("CTL-5.2-01", "CTL-5.2-02", "WIRE-10.5-02")
def test_a_commander_puts_references_into_their_fields(deployment: Deployment) -> None:
    """What it writes to the control stream, as anybody reads it there."""
    config = ControlConfig(**new_endpoints())
    client = aeron.connect(deployment.aeron_dir)
    try:
        received: list[bytes] = []
        listener = client.add_subscription(config.control_channel, config.control_stream_id)
        Commander(client, config).send(TAG, "show", Ref(10_000, 7, 8), until="sent", timeout=30)
        wait_until(
            lambda: listener.poll(lambda data, _: received.append(data), 10) or received, "the command is received"
        )
    finally:
        client.close()
    message = decode(received[0])
    assert isinstance(message, EventMessage)
    expected = raw_event(format=15, ref=(10_000, 7, 8), tag=TAG.encode(), key=b"show")
    assert (received[0][:8], received[0][24:]) == (expected[:8], expected[24:])  # all but timestamp and correlation id


@pytest.mark.spec("CTL-5.2-03", "CTL-5.2-04")
def test_no_bytes_are_a_reference_only_when_all_of_it_is_there(recorder: Recorder) -> None:
    """Otherwise a plain empty value (H4), which a command for references does not accept."""
    with recorder.peer() as peer:
        implicit = peer.command(TAG, "show", **REF)
        assert peer.answer_to(implicit).format is Format.REF
        for missing in REF:
            known: dict[str, Any] = {name: value for name, value in REF.items() if name != missing}
            sent = peer.command(TAG, "show", **known)
            assert b"this is NOTHING" in peer.answer_to(sent, "rejected").value
            plain = peer.command(TAG, "go", **known)
            peer.answer_to(plain)
    assert recorder.ran == [("show", Ref(10_000, 7, 8))] + [("go", None)] * 3


@pytest.mark.spec("CTL-6-02")
def test_what_is_not_accepted_is_not_echoed(recorder: Recorder) -> None:
    """An unknown key, a wrong format, a wrong length, bytes that are no text: none of them runs (H3)."""
    with recorder.peer() as peer:
        sent = [
            peer.command(TAG, "stop"),
            peer.command(TAG, "mark", bytes(8), Format.INT64),
            peer.command(TAG, "mark"),
            peer.command(TAG, "mark", b"\xff", Format.STRING),
            peer.command(TAG, "go", b"\x00", Format.NOTHING),
        ]
        reasons = [peer.answer_to(data, "rejected") for data in sent]
        assert all(reason.tag == TAG and reason.format is Format.STRING for reason in reasons)
        assert not [data for data in sent if peer.is_echoed(data)]
    assert recorder.ran == []


@pytest.mark.spec("CTL-6-03", "CTL-6-01")
def test_the_status_stream_is_the_record_of_what_was_accepted(recorder: Recorder) -> None:
    """A reader of this stream alone, also one that joins late, knows what ran and in which order."""
    with recorder.peer() as peer:
        peer.answer_to(peer.command(TAG, "go"))
        late = EventPeer(
            peer.aeron_dir,
            control=CONTROL,
            status=(recorder.config.status_channel, recorder.config.status_stream_id),
            turn=recorder.service.invoke,
        )
        with late:
            begun = len(recorder.ran)
            for number in range(6):
                peer.command(TAG, "mark", str(number).encode(), Format.STRING)
                peer.command(TAG, "mark", bytes(3), Format.INT8)  # not accepted
            peer.answer_to(peer.command(TAG, "go"))
            late.until(lambda: sum(one.key == "result:go" for one in late.events), "the late one has received all")
            record = [one for one in late.events if one.key in ("mark", "go")]
        ran = [("mark", one.value.decode()) if one.key == "mark" else ("go", None) for one in record]
        assert ran[-len(recorder.ran) + begun :] == recorder.ran[begun:]
        assert len(recorder.ran) == 8


@pytest.mark.spec("CTL-4-01")
def test_a_driver_is_ended_in_order_by_an_event(shared_media_driver: aeron.MediaDriver) -> None:
    """It answers first, tells its clients, removes its memory, and exits with 0; a log level is changed on the way."""
    endpoints = new_endpoints()
    with private_directory() as folder:
        deployment = Deployment(folder, shared_media_driver.aeron_dir, driver={"instance_id": "drained"})
        deployment.tables["control"] = endpoints
        control, status = (IPC, endpoints["control_stream_id"]), (IPC, endpoints["status_stream_id"])
        client = aeron.connect(deployment.aeron_dir)
        notices: list[bytes] = []
        process: DriverProcess
        with deployment.start() as process, EventPeer(deployment.aeron_dir, control=control, status=status) as peer:
            driver = client.add_subscription(*deployment.control)
            tag = "service:driver:drained"
            for level in (b"debug", b"error"):
                assert peer.answer_to(peer.command(tag, "log-level", level, Format.STRING)).value == level
            sent = peer.command(tag, "drain", b"maintenance", Format.STRING)
            assert peer.answer_to(sent).value == b"draining"
            assert peer.is_echoed(sent)
            wait_until(
                lambda: driver.poll(lambda data, _: notices.append(data), 100) or process.has_ended, "the driver ends"
            )
            wait_until(
                lambda: driver.poll(lambda data, _: notices.append(data), 100) == 0 and process.has_ended, "it is gone"
            )
            assert process.finish()[0] == 0
        client.close()
        assert any(isinstance(decode(data), ShmDriverShutdown) for data in notices)
        assert deployment.leftovers() == []
