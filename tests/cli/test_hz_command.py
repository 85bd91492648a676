# SPDX-License-Identifier: Apache-2.0
"""`tensorpool hz`: the figures, and the command against producers of ours and of others."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorpool as tp
from tensorpool import aeron
from tensorpool.cli.hz import SETTLE_NS, Gauge
from tests.cli.conftest import Shell
from tests.support.wire_producer import WireProducer

MS = 1_000_000


def gauge_of(*times_ms: float, window: int = 100) -> Gauge:
    gauge = Gauge(7, window)
    gauge.add(1, 0, -SETTLE_NS)  # what came with the first does not count
    for seq, time_ms in enumerate(times_ms, start=1):
        gauge.add(1, seq, int(time_ms * MS))
    return gauge


def test_mean_shortest_longest_and_jitter() -> None:
    """Of the intervals in the window."""
    figures = gauge_of(0, 10, 20, 40).figures("camera", 45 * MS)
    assert (figures.window, figures.frames, figures.missed) == (3, 4, 0)
    assert figures.rate_hz == pytest.approx(75)
    assert (figures.min_ms, figures.max_ms) == (10, 20)
    assert figures.mean_ms == pytest.approx(40 / 3)
    assert figures.jitter_ms == pytest.approx(4.714, abs=0.001)
    assert figures.silent_s == pytest.approx(0.005)
    assert "75.00 Hz" in str(figures)
    assert gauge_of(*range(0, 1000, 10), window=5).figures(None, 0).window == 5


def test_without_two_frames_there_is_no_rate() -> None:
    """Nothing is guessed."""
    assert gauge_of().figures(None, 0).rate_hz is None
    assert "no rate yet: 1 frames" in str(gauge_of(0).figures(None, 0))


def test_gaps_duplicates_and_new_epochs() -> None:
    """Seqs without a descriptor are missed; an epoch begins anew."""
    gauge = gauge_of(0)
    for epoch, seq, time_ms in ((1, 5, 10), (1, 5, 11), (1, 4, 12), (2, 0, 500), (2, 1, 510)):
        gauge.add(epoch, seq, time_ms * MS)
    figures = gauge.figures(None, 510 * MS)
    assert (figures.frames, figures.missed, figures.window, figures.epoch, figures.seq) == (4, 3, 1, 2, 1)
    assert figures.rate_hz == pytest.approx(100)
    assert "missed 3" in str(figures)
    assert "silent for 2.0 s" in str(gauge.figures(None, 2510 * MS))


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50))
def test_the_figures_agree_with_each_other(gaps_ns: list[int]) -> None:
    """For every course of frames."""
    gauge = Gauge(7, 100)
    now_ns = SETTLE_NS
    gauge.add(1, 0, 0)
    gauge.add(1, 1, now_ns)
    for seq, gap_ns in enumerate(gaps_ns, start=2):
        now_ns += gap_ns
        gauge.add(1, seq, now_ns)
    figures = gauge.figures(None, now_ns)
    assert figures.mean_ms is not None
    assert figures.rate_hz is not None
    assert figures.min_ms is not None
    assert figures.max_ms is not None
    assert figures.min_ms <= figures.mean_ms * (1 + 1e-9)
    assert figures.mean_ms <= figures.max_ms * (1 + 1e-9)
    assert figures.rate_hz * figures.mean_ms == pytest.approx(1000)
    assert figures.window == len(gaps_ns)


@pytest.fixture(scope="module")
def stream(client: tp.Client) -> Iterator[tp.Producer]:
    """A producer at about 100 Hz."""
    stop = threading.Event()
    with client.producer("hz/camera", create=True) as producer:

        def publish() -> None:
            while not stop.wait(0.01):
                producer.publish(np.zeros(8))

        thread = threading.Thread(target=publish)
        thread.start()
        yield producer
        stop.set()
        thread.join()


def test_a_stream_by_name_and_by_id(shell: Shell, stream: tp.Producer) -> None:
    """Ends after so many frames; the last line is for the whole."""
    code, output = shell.run_here("hz", "hz/camera", "--count", "30")
    assert code == 0, output
    assert f"listening to hz/camera ({stream.stream_id}): live, epoch {stream.epoch}" in output
    assert re.search(r"^ +[\d.]+ Hz   mean [\d.]+ ms  min [\d.]+  max [\d.]+  jitter [\d.]+  window 30$", output, re.M)
    code, output = shell.run_here("hz", str(stream.stream_id), "--seconds", "2.5", "--json")
    assert code == 0
    *others, last = [json.loads(line) for line in output.splitlines()]
    assert [line["is_last"] for line in (*others, last)] == [False] * len(others) + [True]
    assert others, "a line a second"
    assert last["name"] == "hz/camera"
    assert last["frames"] > 10
    assert last["rate_hz"] == pytest.approx(1000 / last["mean_ms"])


def test_a_stream_that_is_not_there_is_named_with_those_that_are(shell: Shell, stream: tp.Producer) -> None:
    """Exit code 1."""
    code, output = shell.run_here("hz", "hz/cameras", "--set", "policies.announce_period_ms=1000")
    assert code == 1
    assert "no stream 'hz/cameras' was announced at" in output
    assert f"hz/camera ({stream.stream_id})" in output


def test_a_silent_stream_says_who_could_publish(shell: Shell, client: tp.Client) -> None:
    """No frame is no rate."""
    with client.producer("hz/silent", create=True) as producer:
        epoch = producer.epoch
        code, output = shell.run_here("hz", "hz/silent", "--seconds", "0.3")
    assert code == 0
    assert f"no frame: idle, epoch {epoch}, producer {producer.producer_id}" in output


def test_a_foreign_producer_is_measured_without_a_lease(
    shell: Shell, shm_dir: Path, shared_media_driver: aeron.MediaDriver
) -> None:
    """It tells neither name nor QoS, and hears nothing from us."""
    stop = threading.Event()
    with WireProducer(shm_dir / "regions", shared_media_driver.aeron_dir) as peer:

        def publish() -> None:
            while not stop.wait(0.01):
                peer.publish(bytes(16))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            settings = [f"--set={key}={value}" for key, value in peer.settings.items() if "base_dir" not in key]
            arguments = [str(peer.stream_id), "--count", "20", "--json", *settings]
            code, output = shell.run_here("hz", *arguments, "--aeron-dir", shared_media_driver.aeron_dir)
        finally:
            stop.set()
            thread.join()
        assert code == 0, output
        last = json.loads(output.splitlines()[-1])
        assert (last["name"], last["epoch"], last["window"]) == (None, peer.epoch, 20)
        assert peer.grants == []
        assert {type(received.message).__name__ for received in peer.transcript} <= {
            "ShmPoolAnnounce",
            "FrameDescriptor",
        }


def test_a_live_stream_is_not_called_abandoned_before_its_first_announce() -> None:
    """Descriptors come at once, announces every second and a half: the first line waits for who writes the stream."""
    stop = threading.Event()
    overrides = {"policies.announce_period_ms": 1500}
    with tp.local(overrides=overrides) as pool, pool.connect() as client, client.producer("hz/new", create=True) as it:

        def publish() -> None:
            while not stop.wait(0.01):
                it.publish(np.zeros(8))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            period = "policies.announce_period_ms=1500"
            code, output = Shell(pool).run_here("hz", str(it.stream_id), "--seconds", "0.3", "--set", period)
        finally:
            stop.set()
            thread.join()
        assert code == 0, output
        words = rf"^listening to {it.stream_id}: (live|idle), epoch {it.epoch}, producer {it.producer_id}$"
        assert re.search(words, output, re.MULTILINE), output
