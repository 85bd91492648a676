# SPDX-License-Identifier: Apache-2.0
"""A recorder as a service: paused, resumed, asked and drained by events, with every frame once or in a gap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.spark.lake import Lake
from tensorpool.spark.recorder import Recorder, Settings
from tests.control.peer import IPC, EventPeer
from tests.spark.conftest import new_stream
from tests.support.lakes import Camera, check, options_of
from tests.support.processes import wait_until

TAG = "service:recorder:held"


@pytest.mark.parametrize("mode", ["tail", "batches"])
def test_a_pause_costs_what_the_rings_forgot_in_it(
    spark: SparkSession, pool: tp.Local, client: Client, tmp_path: Path, mode: str
) -> None:
    """Paused it takes no frames; resumed it goes on: a deep ring has them all, a small one leaves a gap."""
    deep, tiny = new_stream("deep"), new_stream("tiny")
    settings = Settings(
        mode=mode, trigger_s=0.1, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool)
    )
    recorder = Recorder(spark, [deep, tiny], tmp_path / "lake", name="held", settings=settings)
    with Camera(client, deep, tiny, hz=50) as camera:  # the deep ring lasts 80 s
        recorder.start()
        peer = EventPeer(pool.aeron_dir, control=(IPC, 1400), status=(IPC, 1401), turn=recorder.poll)
        with peer:
            wait_until(lambda: recorder.poll() or recorder.totals().frames >= 20, "it records")
            assert peer.answer_to(peer.command(TAG, "pause")).value == b"paused"
            assert recorder.is_paused
            held = recorder.totals().frames
            producer = camera.producers[tiny]
            until = producer.next_seq + 40  # five times what the small ring holds
            wait_until(lambda: recorder.poll() or producer.next_seq > until, "more is published")
            status = json.loads(peer.answer_to(peer.command(TAG, "status")).value)
            assert (status["frames"], status["state"], status["streams"]) == (held, "paused", [deep, tiny])
            assert peer.answer_to(peer.command(TAG, "resume")).value == b"running"
            wait_until(lambda: recorder.poll() or recorder.totals().frames > held + 40, "it goes on")
            ends = camera.stop()
            assert peer.answer_to(peer.command(TAG, "drain")).value == b"draining"
            peer.until(lambda: recorder.is_drained, "it is drained")
        totals = recorder.stop()
    assert totals.adds_up
    lost = {stream.stream_id: stream.lost for stream in totals.streams}
    assert lost[deep] == 0
    assert lost[tiny] >= 20
    check(Lake.open(tmp_path / "lake"), ends)
