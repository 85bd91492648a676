# SPDX-License-Identifier: Apache-2.0
"""`tap` shows every message that travels, hides tokens, names malformed ones, and blocks no publisher."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.wire.control import QosProducer
from tensorpool.wire.driver import ShmDriverShutdownRequest, ShutdownReason
from tests.cli.conftest import Shell
from tests.support.processes import Process, wait_until

CONTROL = ("aeron:ipc?term-length=64k", 1000)


def listen(shell: Shell, *arguments: str) -> Process:
    """A tap that listens."""
    process = shell.start("tap", *arguments)
    assert process.read_line().startswith("listening at ")
    return process


@pytest.fixture
def transport(shell: Shell) -> Iterator[aeron.Client]:
    client = aeron.connect(shell.pool.aeron_dir)
    yield client
    client.close()


def test_tap_tells_the_story_of_an_attach(shell: Shell, client: tp.Client) -> None:
    """Requests, answers, announces, descriptors and reports come one line each, with their fields."""
    with listen(shell, "--descriptors") as tap:
        with client.producer("tapped", create=True) as producer, client.consumer(producer.stream_id):
            stream_id, epoch = producer.stream_id, producer.epoch
            producer.wait_for_consumers()
            producer.publish(np.zeros(4))
            seen: list[str] = []
            while not {"FrameDescriptor", "QosConsumer", "DataSourceAnnounce"} <= {line.split()[2] for line in seen}:
                seen.append(tap.read_line())
                assert seen[-1], "the tap ended"
        while "ShmDetachRequest" not in seen[-1]:
            seen.append(tap.read_line())
        tap.send(signal.SIGTERM)
        assert tap.finish()[0] == 0
    text = "\n".join(seen)
    assert re.search(rf"^\d\d:\d\d:\d\d\.\d{{3}}  control     ShmAttachRequest .*stream_id={stream_id} ", text, re.M)
    assert re.search(rf"control     ShmAttachResponse .*code=OK .*epoch={epoch} .*region_uri=…/1\.pool", text)
    assert re.search(rf"control     ShmPoolAnnounce .*stream_id={stream_id} ", text)
    assert re.search(rf"descriptor  FrameDescriptor +stream_id={stream_id} epoch={epoch} seq=0", text)
    assert re.search(rf"qos         QosConsumer +stream_id={stream_id} ", text)
    assert re.search(rf"metadata    DataSourceAnnounce +stream_id={stream_id} .*name=tapped", text)


def test_tap_shows_what_was_asked_for_and_names_what_is_malformed(shell: Shell, transport: aeron.Client) -> None:
    """--only, --stream and --count choose; bytes that are no message are shown with their fault; tokens are hidden."""
    right = QosProducer(stream_id=4711, producer_id=3, epoch=7, current_seq=5).encode()
    other = QosProducer(stream_id=4712, producer_id=3, epoch=7, current_seq=5).encode()
    token = ShmDriverShutdownRequest(correlation_id=4711, reason=ShutdownReason.ADMIN, token="s3cret", error_message="")
    messages = (right, other, right[:-1], b"what?", token.encode(), token.encode()[:-1])
    with (
        listen(shell, "--only", "QosProducer", "--stream", "4711", "--count", "1") as chosen,
        listen(shell, "--only", "malformed,ShmDriverShutdownRequest", "--count", "4", "--json") as faults,
    ):
        publication = transport.add_publication(*CONTROL, exclusive=True)
        wait_until(lambda: publication.has_room, "the taps hear the publication")
        for message in messages:
            assert publication.offer(message)
        code, output = chosen.finish()
        assert code == 0
        assert re.fullmatch(
            r"\S+  control     QosProducer         stream_id=4711 producer_id=3 epoch=7 current_seq=5\n", output
        )
        code, output = faults.finish()
    assert code == 0
    lines = [json.loads(line) for line in output.splitlines()]
    assert "s3cret" not in output
    assert b"s3cret".hex() not in output
    malformed = [line for line in lines if line["message"] == "malformed"]
    assert len(malformed) == 3
    assert re.search(r"QosProducer.*\(at byte \d+\)", malformed[0]["error"])
    assert malformed[0]["data"] == {"hex": right[:-1].hex()}
    assert malformed[1]["bytes"] == 5
    assert "data" not in malformed[2]
    (request,) = (line for line in lines if line["message"] == "ShmDriverShutdownRequest")
    assert request["token"] == "<hidden>"
    assert request["aeron_stream"] == "control"
    assert isinstance(request["received_ns"], int)


def test_a_tap_that_sleeps_blocks_no_publisher(shell: Shell, transport: aeron.Client) -> None:
    """A publisher goes on past a tap that is stopped; the tap finds back by itself, and says what it missed."""
    timeouts = "untethered-window-limit-timeout=100ms|untethered-resting-timeout=100ms"
    publication = transport.add_publication(f"aeron:ipc?term-length=64k|{timeouts}", 1100, exclusive=True)
    with listen(shell, "--descriptors", "--only", "FrameDescriptor", "--json") as tap:

        def publish_until(position: int) -> bool:
            for _ in range(200):
                publication.offer_descriptor(9, 1, publication.position)
            listener.poll(lambda data, info: None, 1000)
            return publication.position > position

        listener = transport.add_subscription("aeron:ipc", 1100)  # a subscriber that keeps up
        wait_until(lambda: publish_until(0), "the publication has a subscriber")
        assert json.loads(tap.read_line())["stream_id"] == 9
        tap.send(signal.SIGSTOP)
        wait_until(lambda: publish_until(1 << 20), "the log has turned several times without the tap")
        tap.send(signal.SIGCONT)
        while "fell behind: missed" not in (line := tap.read_line()):
            assert line, "the tap ended"
        tap.send(signal.SIGTERM)
        assert tap.finish()[0] == 0
