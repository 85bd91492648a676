# SPDX-License-Identifier: Apache-2.0
"""Notes that many clients send by themselves, and commands in the audit log with the process that sent them."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from tensorpool import aeron
from tensorpool.clock import ManualClock
from tensorpool.control import Commander, read_value
from tensorpool.wire.event import Format
from tests.control.conftest import Bench, MakeBench
from tests.control.peer import raw_event
from tests.support.processes import wait_until

TAG = "service:recorder:lab1"
SECOND_NS = 1_000_000_000


def test_a_note_needs_no_reader_and_counts_towards_no_rate(make_bench: MakeBench) -> None:
    """More notes than echoes are kept and commands are allowed, without a subscriber; then a query is answered."""
    bench = make_bench(commands_per_s=5)
    service = bench.service()
    noted: list[int] = []

    @service.command("note", is_note=True)
    def note(value: int) -> None:
        noted.append(value)

    @service.command("count", is_query=True)
    def count() -> int:
        return len(noted)

    service.bind(bench.client)
    config = bench.config
    publication = bench.client.add_publication(config.control_channel, config.control_stream_id)
    header = (40, 1, config.schema_id, 1)
    for number in range(200):
        value = number.to_bytes(8, "little")
        data = raw_event(header=header, tag=TAG.encode(), key=b"note", value=value, format=Format.INT64)
        while not publication.offer(data):
            bench.turn()
    wait_until(lambda: bench.turn() == 0 and len(noted) >= 200, "all are noted")
    assert noted == list(range(200))
    assert (service.counts.get("unechoed", 0), service.counts["over_rate"]) == (0, 0)
    peer = bench.peer()
    assert read_value(peer.answer_to(peer.command(TAG, "count")))[1] == 200
    assert service.keys == ["count"]


def test_commands_are_in_the_audit_log_with_their_sender(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Those that change something; an unsigned attempt that a signed one follows is not, another one is."""
    caplog.set_level("INFO", "tensorpool.audit")
    clock = ManualClock(SECOND_NS, time.time_ns())
    service = bench.service(clock=clock)

    @service.command("look", is_query=True)
    def look() -> str:
        return "closed"

    @service.command("open", authorised=True)
    def act(value: str) -> str:
        return value

    service.bind(bench.client)
    answers: list[object] = []

    def send() -> None:
        with contextlib.closing(aeron.connect(bench.aeron_dir)) as client:
            commander = Commander(client, bench.config)
            answers.append(commander.send(TAG, "look", timeout=60).value)
            answers.append(commander.send(TAG, "open", "the\x1b door", timeout=60).value)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: bench.turn() >= 0 and not thread.is_alive(), "both are answered")
    assert answers == ["closed", "the\x1b door"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("command kind='audit' service='recorder' instance_id='lab1' key='open' ")
    assert f"pid={os.getpid()} " in line
    assert "identity='seen'" in line
    assert r"value='the\\x1b door'" in line

    peer = bench.peer()
    unsigned = raw_event(
        header=(40, 1, bench.config.schema_id, 1), tag=TAG.encode(), key=b"open", value=b"x", format=12
    )
    peer.say(unsigned)
    peer.hear("rejected:open", 1)
    assert len(caplog.records) == 1
    clock.advance(2 * SECOND_NS)
    bench.turn()
    refused = caplog.records[-1].getMessage()
    assert refused.startswith("command_refused ")
    assert "identity='unknown'" in refused
    assert "not authorised" in refused
