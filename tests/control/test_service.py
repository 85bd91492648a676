# SPDX-License-Identifier: Apache-2.0
"""A service at its streams: it answers what is for it, survives the rest, and runs nothing that it could not echo."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from random import Random
from typing import Any

import pytest

from tensorpool import aeron
from tensorpool.clock import ManualClock
from tensorpool.control import Alive, Ref, Service, State, add_common_commands, read_alive, read_value
from tensorpool.errors import DecodeError, LocalProtocolError, RemoteProtocolError, TransportError
from tensorpool.logs import level, set_level
from tensorpool.wire import decode
from tensorpool.wire.event import EventMessage, Format
from tests.control.conftest import Bench, MakeBench
from tests.control.peer import EventPeer, raw_event
from tests.support.disc_client import unused_udp_channel
from tests.support.processes import wait_until

TAG = "service:recorder:lab1"
SECOND_NS = 1_000_000_000


def text(message: EventMessage) -> str:
    assert message.format is Format.STRING
    return message.value.decode()


def lives(peer: EventPeer, events: list[EventMessage] | None = None) -> list[Alive]:
    return [found for one in (events or peer.events) if (found := read_alive(one)) is not None]


def served(bench: Bench, **more: Any) -> Service:
    """A service with two commands of its own, bound."""
    service = bench.service(**more)

    @service.command("double")
    def double(value: float) -> float:
        return 2 * value

    @service.command("fail")
    def fail() -> None:
        raise RuntimeError("the motor is hot")

    service.bind(bench.client)
    return service


def test_a_command_is_echoed_then_run_then_answered(bench: Bench) -> None:
    """In this order on the status stream, with the command's correlation id."""
    served(bench)
    peer = bench.peer()
    sent = peer.command(TAG, "double", b"\x03", Format.UINT8)
    answer = peer.answer_to(sent)
    assert (answer.tag, read_value(answer)) == (TAG, (Format.FLOAT64, 6.0))
    assert peer.received.index(sent) < peer.events.index(answer)


def test_a_handler_that_raises_answers_with_its_error_and_the_service_lives_on(bench: Bench) -> None:
    """An error is accepted work that failed: it is echoed."""
    service = served(bench)
    peer = bench.peer()
    sent = peer.command(TAG, "fail")
    assert text(peer.answer_to(sent, "error")) == "RuntimeError: the motor is hot"
    assert peer.is_echoed(sent)
    peer.answer_to(peer.command(TAG, "double", b"\x01", Format.INT8))
    assert (service.counts["failed"], service.counts["accepted"]) == (1, 2)


def test_results_that_cannot_travel_are_errors(bench: Bench) -> None:
    """Of the command that returned them."""
    service = bench.service()
    service.command("odd")(lambda: object())
    service.command("huge")(lambda: b"x" * (1 << 20))
    service.bind(bench.client)
    peer = bench.peer()
    assert "fits no format" in text(peer.answer_to(peer.command(TAG, "odd"), "error"))
    assert "the status stream takes" in text(peer.answer_to(peer.command(TAG, "huge"), "error"))


def test_what_is_not_accepted_is_answered_with_the_reason(bench: Bench) -> None:
    """And counted, and never echoed; reasons stay short whatever a peer sends."""
    service = served(bench)
    peer = bench.peer()
    cases = {
        peer.command(TAG, "trible"): "'trible' is no command of it; it knows double, fail",
        peer.command(TAG, "double", b"x", Format.STRING): "double takes a number; this is STRING 'x'",
        peer.command(TAG, "double", bytes(3), Format.INT32): "3 bytes, INT32 has 4",
        peer.command(TAG, "double", bytes(70_000), Format.BYTES): "70000 bytes, at most 65536",
    }
    for sent, reason in cases.items():
        assert reason in text(peer.answer_to(sent, "rejected"))
        assert not peer.is_echoed(sent)
    odd = peer.command(TAG, "a b" * 5000, correlation_id=77)
    assert len(peer.hear("rejected:?", 77).value) < 1100
    assert not peer.is_echoed(odd)
    assert service.counts["rejected"] == len(cases) + 1


def test_hostile_messages_are_counted_drops(bench: Bench) -> None:
    """Cut short, of other schemas, with absurd lengths, or not ASCII: nothing of it is answered, or stops anything."""
    service = served(bench)
    peer = bench.peer()
    good = raw_event(tag=TAG.encode(), key=b"fail")
    malformed = [
        b"",
        good[:7],
        good[:30],
        good[:-1],
        good + b"\x00",
        raw_event(header=(39, 1, 905, 1), tag=TAG.encode(), key=b"fail")[:-1],
        raw_event(header=(0xFFFF, 1, 905, 1), tag=TAG.encode(), key=b"fail"),
        raw_event(header=(40, 1, 905, 2), tag=TAG.encode(), key=b"fail"),
        raw_event(format=99, tag=TAG.encode(), key=b"fail"),
        raw_event(tag=TAG.encode(), key=b"fail", lengths=(0xFFFFFFFF, 4, 0)),
        raw_event(tag=TAG.encode(), key=b"fail", lengths=(len(TAG), 0xFFFFFFFF, 0)),
        raw_event(tag=TAG.encode(), key=b"fail", lengths=(len(TAG), 4, 1 << 30)),
        raw_event(tag=TAG.encode(), key="fäil".encode()),
        raw_event(tag=TAG.encode(), key=b"\xff\xfe"),
    ]
    others = [raw_event(tag=tag, key=b"fail") for tag in (b"", b"service:recorder", TAG.encode() + b"\x00", b"\xff")]
    foreign = [raw_event(header=(40, 1, 900, 1), tag=TAG.encode()), raw_event(header=(40, 2, 905, 1))]
    for data in (*malformed, *others, *foreign):
        peer.say(data)
    peer.answer_to(peer.command(TAG, "fail"), "error")  # all before it were read
    counts = service.counts
    assert (counts["malformed"], counts["other_tag"], counts["other_schema"]) == (len(malformed), len(others), 2)
    assert [one.key for one in peer.events if one.key != "alive"] == ["fail", "error:fail"]


def judged(data: bytes) -> str:
    """What is to become of a message, by the specification alone."""
    if len(data) < 8:
        return "malformed"
    block_length, template_id, schema_id, _ = struct.unpack_from("<4H", data)
    if (schema_id, template_id) != (905, 1):
        return "other_schema"
    at = 8 + block_length
    if block_length < 40 or at + 4 > len(data):
        return "malformed"
    (length,) = struct.unpack_from("<I", data, at)
    if at + 4 + length > len(data):
        return "malformed"
    if data[at + 4 : at + 4 + length] != TAG.encode():
        return "other_tag"
    try:
        message = decode(data)
    except DecodeError:
        return "malformed"
    assert isinstance(message, EventMessage)
    if not message.key.isascii():
        return "malformed"
    try:
        is_good = message.key == "double" and isinstance(read_value(message)[1], (int, float))
    except RemoteProtocolError:
        is_good = False
    return "accepted" if is_good and not isinstance(read_value(message)[1], bool) else "rejected"


@pytest.mark.parametrize("seed", range(2))
def test_mangled_messages_are_judged_as_the_specification_has_it(make_bench: MakeBench, seed: int) -> None:
    """Bytes changed, cut, added and moved in thousands of commands: each is counted for what it is, none does harm."""
    random = Random(seed)
    bench = make_bench(commands_per_s=1_000_000)
    service = served(bench)
    peer = bench.peer()
    expected: Counter[str] = Counter()
    for _ in range(1500):
        data = bytearray(raw_event(tag=TAG.encode(), key=b"double", format=1, value=b"\x07"))
        for _ in range(random.randrange(3)):
            if random.random() < 0.3:
                del data[random.randrange(len(data) + 1) :]
            elif random.random() < 0.3:
                data[random.randrange(len(data) + 1) : 0] = random.randbytes(random.randrange(1, 5))
            elif data:
                at = (
                    random.choice([0, 2, 4, 6, 24, 48, 73, 83])
                    if random.random() < 0.5
                    else random.randrange(len(data))
                )
                data[at % len(data)] = random.choice([0, 1, 7, 12, 255, random.randrange(256)])
        expected[judged(bytes(data))] += 1
        peer.say(bytes(data))
    peer.answer_to(peer.command(TAG, "double", b"\x01", Format.INT8))
    expected["accepted"] += 1
    counts = service.counts
    assert {name: counts[name] for name in expected} == dict(expected)
    assert min(expected.values()) > 10


def test_aliases_are_further_tags_and_the_echo_keeps_the_one_that_was_used(make_bench: MakeBench) -> None:
    """By configuration or by the program; results come under the service's own tag."""
    bench = make_bench(aliases=("service:recorder",))
    served(bench, aliases=["all"])
    peer = bench.peer()
    for tag in ("service:recorder", "all", TAG):
        sent = peer.command(tag, "double", b"\x01", Format.INT8)
        assert peer.answer_to(sent).tag == TAG
        assert peer.is_echoed(sent)


def test_a_command_whose_echo_finds_no_room_waits_and_is_not_run(make_bench: MakeBench) -> None:
    """With a subscriber that does not read: nothing runs that is not on the record, and the reason is sent later."""
    bench = make_bench(status_channel="aeron:ipc?term-length=64k", alive_period_ms=3_600_000, command_timeout_ms=2000)
    clock = ManualClock(SECOND_NS, SECOND_NS)
    service = bench.service(clock=clock)
    ran: list[int] = []
    service.command("run")(lambda: ran.append(1))
    service.bind(bench.client)
    peer = bench.peer()  # tethered: the service has to wait for it
    filled = 0
    while service.status("filler", b"x" * 1000) and service.counts.get("status_dropped", 0) == 0 and filled < 1000:
        filled += 1
    assert service.counts["status_dropped"] > 0
    first = peer_command(bench, "run", 1)
    wait_until(lambda: service.invoke() or service.counts["mine"] == 1, "the first is received")
    clock.advance(3 * SECOND_NS // 2)
    second = peer_command(bench, "run", 2)
    wait_until(lambda: service.invoke() or service.counts["mine"] == 2, "the second is received")
    assert ran == []
    clock.advance(SECOND_NS)  # the first has waited for longer than a commander does
    service.invoke()
    assert service.counts["unechoed"] == 1
    peer.until(lambda: ran == [1], "the second is run once there is room")
    peer.wait_for_echo(second)
    assert not peer.is_echoed(first)


def peer_command(bench: Bench, key: str, correlation_id: int) -> bytes:
    """A command that is sent without reading anything."""
    data = raw_event(tag=TAG.encode(), key=key.encode(), correlation_id=correlation_id)
    config = bench.config
    publication = bench.client.add_publication(config.control_channel, config.control_stream_id)
    wait_until(lambda: publication.offer(data), "the command is sent")
    return data


@pytest.mark.spec("CTL-6-01", "CTL-6-03")
def test_a_command_that_changes_something_waits_for_a_reader_of_the_record(make_bench: MakeBench) -> None:
    """K5: without a subscriber of the status stream it is not accepted; with one that comes in time it is."""
    bench, clock = make_bench(command_timeout_ms=2000), ManualClock(SECOND_NS, SECOND_NS)
    service = served(bench, clock=clock)
    peer_command(bench, "fail", 1)
    wait_until(lambda: service.invoke() or service.counts["mine"] == 1, "the command is received")
    clock.advance(3 * SECOND_NS)
    service.invoke()
    assert (service.counts["unechoed"], service.counts.get("accepted", 0)) == (1, 0)
    late = peer_command(bench, "fail", 2)
    wait_until(lambda: service.invoke() or service.counts["mine"] == 2, "another is received")
    peer = bench.peer()
    peer.wait_for_echo(late)
    peer.answer_to(late, "error")
    assert (service.counts["accepted"], service.counts["failed"]) == (1, 1)


@pytest.mark.spec("CTL-6-01")
def test_a_query_is_answered_at_once_and_its_echo_kept_for_the_next_reader(bench: Bench) -> None:
    """K5: ping and status do not wait, not even behind a command that does."""
    service = served(bench, clock=ManualClock(SECOND_NS, SECOND_NS))
    service.command("ask", is_query=True)(lambda: "answer")
    peer_command(bench, "fail", 1)
    asked = peer_command(bench, "ask", 2)
    wait_until(lambda: service.invoke() or service.counts.get("accepted", 0) == 1, "the query has run")
    peer = bench.peer()
    peer.wait_for_echo(asked)
    assert text(peer.answer_to(asked)) == "answer"


def test_more_commands_than_the_rate_are_rejected(make_bench: MakeBench) -> None:
    """A flood to its own tag costs a service what its configuration allows."""
    bench = make_bench(commands_per_s=5)
    service = served(bench, clock=ManualClock(SECOND_NS, SECOND_NS))
    peer = bench.peer()
    sent = [peer.command(TAG, "double", b"\x01", Format.INT8) for _ in range(40)]
    peer.until(lambda: service.counts["mine"] == 40, "all were read")
    assert (service.counts["over_rate"], service.counts["accepted"]) == (35, 5)
    assert "control.commands_per_s" in text(peer.answer_to(sent[-1], "rejected"))
    assert list(map(peer.is_echoed, sent)) == [True] * 5 + [False] * 35


def test_junk_takes_nothing_from_the_rate(make_bench: MakeBench) -> None:
    """Messages to its tag that are no commands, before those that are."""
    bench = make_bench(commands_per_s=8)
    service = served(bench, clock=ManualClock(SECOND_NS, SECOND_NS))
    peer = bench.peer()
    for number in range(40):
        peer.command(TAG, f"junk{number}")
        peer.command(TAG, "double", b"?", Format.STRING)
        peer.say(raw_event(tag=TAG.encode(), key=b"double", format=99))
    sent = [peer.command(TAG, "double", b"\x01", Format.INT8) for _ in range(8)]
    for data in sent:
        peer.answer_to(data)
    assert service.counts["accepted"] == 8


@pytest.mark.spec("CTL-5-04")
def test_of_a_long_message_to_another_service_no_byte_is_kept(bench: Bench) -> None:
    """It comes in fragments: the first one has the tag, and no assembler is made for the rest."""
    service = served(bench)
    peer = bench.peer()
    assert service._streams is not None
    for tag, schema in ((b"service:other", 905), (TAG.encode(), 906)):
        peer.say(raw_event(header=(40, 1, schema, 1), tag=tag, key=b"k", value=bytes(100_000)))
    peer.until(lambda: service.counts["other_tag"] == service.counts["other_schema"] == 1, "both are passed over")
    assert service._streams.commands.partial_sessions == 0
    long = peer.say(raw_event(tag=TAG.encode(), key=b"k", value=bytes(60_000), correlation_id=5))
    peer.answer_to(long, "rejected")
    assert service._streams.commands.partial_sessions == 1


@pytest.mark.spec("CTL-5-04")
def test_a_command_that_is_too_long_is_given_up_before_it_is_whole(make_bench: MakeBench) -> None:
    """Also with the service's own tag: a stranger's message takes no more memory than an honest one."""
    bench = make_bench(control_channel="aeron:ipc?term-length=16m")
    service = served(bench)
    peer = bench.peer()
    assert service._streams is not None
    for _ in range(3):
        peer.say(raw_event(tag=TAG.encode(), key=b"k", value=bytes(1_100_000)))
    peer.until(lambda: service.counts["too_long"] == 3, "all are given up")
    assert service._streams.commands.partial_sessions == 0
    peer.answer_to(peer.command(TAG, "double", b"\x01", Format.INT8))


def test_commands_from_before_a_service_are_not_for_it(bench: Bench) -> None:
    """A new one does not obey what ended its predecessor, though it finds it in the log."""
    config = bench.config
    sleeper = bench.client.add_subscription(config.control_channel, config.control_stream_id)  # keeps the log alive
    shared = bench.client.add_publication(config.control_channel, config.control_stream_id)
    own = bench.client.add_publication(config.control_channel, config.control_stream_id, exclusive=True)
    old = raw_event(tag=TAG.encode(), key=b"fail", correlation_id=1)
    wait_until(lambda: shared.offer(old), "a command is in the log that all share")
    wait_until(lambda: own.offer(old), "and in a log of its own")
    service = served(bench)
    wait_until(lambda: service.invoke() or service.counts["from_before"] == 2, "both are passed over")
    peer = bench.peer()
    peer.answer_to(peer.command(TAG, "double", b"\x01", Format.INT8))
    assert (service.counts["accepted"], service.counts.get("failed", 0)) == (1, 0)
    sleeper.close()


def test_signs_of_life_come_by_the_period_and_when_the_state_changes(bench: Bench) -> None:
    """With who it is and how it is."""
    clock = ManualClock(SECOND_NS, SECOND_NS)
    service = bench.service(clock=clock)
    service.bind(bench.client)
    peer = bench.peer()
    clock.advance(SECOND_NS)
    peer.until(lambda: lives(peer), "it is alive")
    count = len(lives(peer))
    service.state = State.PAUSED
    peer.until(lambda: len(lives(peer)) == count + 1, "the change is published at once")
    for _ in range(10):
        service.invoke()
    clock.advance(SECOND_NS)
    peer.until(lambda: len(lives(peer)) == count + 2, "and again after a second")
    last = lives(peer)[-1]
    assert (last.service, last.instance, last.state) == ("recorder", "lab1", State.PAUSED)
    assert last.pid > 0


def test_status_events_carry_any_value(bench: Bench) -> None:
    """Under keys that cannot be taken for answers."""
    service = served(bench)
    assert not bench.service("other").status("progress", 1)  # not bound
    peer = bench.peer()
    assert service.status("progress", 0.5)
    assert service.status("frame", Ref(1, 2, 3))
    assert read_value(peer.hear("progress"))[1] == 0.5
    assert read_value(peer.hear("frame"))[1] == Ref(1, 2, 3)
    with pytest.raises(LocalProtocolError):
        service.status("result:double", 1)


def test_the_standard_commands(bench: Bench) -> None:
    """Ping, status, log-level, pause, resume and drain; what ends the service comes after its answer."""
    service = bench.service()
    done: list[str] = []
    add_common_commands(
        service,
        status=lambda: {"frames": 3},
        drain=lambda: done.append(f"drain behind {len(peer.received)}"),
        pause=lambda: done.append("pause"),
        resume=lambda: "resumed after 3 s",
    )
    service.bind(bench.client)
    peer = bench.peer()

    def ask(key: str, value: bytes = b"", format: Format = Format.NOTHING, kind: str = "result") -> str:
        return text(peer.answer_to(peer.command(TAG, key, value, format), kind))

    before = level()
    try:
        assert ask("ping") == "pong"
        assert '"frames":3' in ask("status")
        assert ask("log-level", b"error", Format.STRING) == "error" == level()
        assert ask("log-level") == "error"
        assert "'debug' or 'info'" in ask("log-level", b"loud", Format.STRING, "rejected")
    finally:
        set_level(before)
    assert ask("pause") == "paused"
    assert service.state is State.PAUSED
    assert ask("pause") == "already paused"
    assert ask("resume") == "resumed after 3 s"
    assert service.state is State.RUNNING
    assert ask("drain") == "draining"
    wait_until(lambda: service.invoke() or len(done) == 2, "it drains")
    assert done[0] == "pause"
    assert ask("pause", kind="rejected") == "it is draining"
    assert ask("drain") == "already draining"


def test_what_changes_something_is_not_accepted_from_the_network(make_bench: MakeBench) -> None:
    """By default: anybody may send datagrams. Queries are, and so is what control.allow_remote lists."""
    done: list[str] = []
    bench = make_bench(control_channel=unused_udp_channel(), allow_remote=("pause", "resume"))
    service = bench.service()
    add_common_commands(
        service,
        status=dict,
        drain=lambda: pytest.fail("drained"),
        pause=lambda: done.append("pause"),
        resume=lambda: done.append("resume"),
    )
    service.bind(bench.client)
    peer = bench.peer()
    peer.hear("alive")
    assert text(peer.answer_to(peer.command(TAG, "ping"))) == "pong"
    for key in ("drain", "log-level"):
        sent = peer.command(TAG, key)
        assert "control.allow_remote" in text(peer.answer_to(sent, "rejected"))
        assert not peer.is_echoed(sent)
    peer.answer_to(peer.command(TAG, "pause"))
    assert done == ["pause"]


def test_draining_by_an_event_needs_leave(make_bench: MakeBench) -> None:
    """Not accepted, with the key that would allow it."""
    bench = make_bench(drain="never")
    service = bench.service()
    add_common_commands(service, status=dict, drain=lambda: pytest.fail("drained"))
    service.bind(bench.client)
    peer = bench.peer()
    sent = peer.command(TAG, "drain")
    assert "control.drain is 'never'" in text(peer.answer_to(sent, "rejected"))


def test_streams_that_cannot_be_opened_are_an_error_or_waited_for(bench: Bench) -> None:
    """A log that others made with other terms: a program gets the error, a host that is patient goes on."""
    config = bench.config
    other = bench.client.add_publication("aeron:ipc?term-length=64k", config.control_stream_id)
    service = bench.service()
    with pytest.raises(TransportError, match="term"):
        service.bind(bench.client)
    clock = ManualClock(SECOND_NS, SECOND_NS)
    patient = bench.service("patient", clock=clock)
    patient.bind(bench.client, patiently=True)
    assert not patient.is_bound
    other.close()

    def opened() -> bool:
        clock.advance(6 * SECOND_NS)
        patient.invoke()
        return patient.is_bound

    wait_until(opened, "it is opened once the other is gone")


def test_a_service_is_made_once_per_key_and_survives_a_lost_connection(media_driver: aeron.MediaDriver) -> None:
    """One that was bound patiently waits for its host; another raises."""
    client = aeron.connect(media_driver.aeron_dir)
    service = Service("x")
    service.command("a")(lambda: None)
    with pytest.raises(LocalProtocolError, match="has a handler already"):
        service.command("a")(lambda: None)
    service.bind(client)
    assert service.is_bound
    client.close()
    with pytest.raises(Exception, match="close"):
        service.invoke()
    service.unbind()
    client = aeron.connect(media_driver.aeron_dir)
    service.bind(client, patiently=True)
    client.close()
    assert service.invoke() == 0
    assert not service.is_bound
    thread = threading.Thread(target=service.unbind)  # harmless from anywhere once it is lost
    thread.start()
    thread.join()
