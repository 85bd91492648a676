# SPDX-License-Identifier: Apache-2.0
"""`produce` and `consume` as processes of their own, against a real driver."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.cli.test_pattern import Checked
from tensorpool.client.fitting_ring import ring_for
from tensorpool.shm import PoolSpec, RingSpec
from tests.cli.conftest import Shell
from tests.support.processes import Process, terminal_environment, wait_until


def wait_for_line(process: Process, text: str) -> str:
    """The first line of output that contains it."""
    while text not in (line := process.read_line()):
        assert line, f"the process ended before it said {text!r}"
    return line


@pytest.mark.parametrize("order", ["C", "F"])
def test_every_frame_is_accounted_for_and_every_byte_is_right(shell: Shell, client: tp.Client, order: str) -> None:
    """What was produced is what was received and lost; of what was received, every byte of `checked` is right."""
    name = f"bytes/{order}"
    with shell.start(
        *("produce", name, "--wait-for-consumers", "1", "--count", "200", "--rate", "400", "--json"),
        *("--pattern", "checked", "--shape", "37x41", "--dtype", "float32", "--order", order),
    ) as producer:
        wait_until(lambda: client.discover(name), "the producer waits for its consumer")
        with shell.start("consume", name, "--timeout", "4", "--verify", "--json") as consumer:
            produced, words = producer.finish()
            code, output = consumer.finish()
    assert produced == 0, words
    summary = json.loads(words.splitlines()[-1])
    assert summary["published"] == 200
    assert summary["bytes"] == 200 * 37 * 41 * 4
    assert summary["dropped"] == {}
    assert summary["name"] == name
    received = json.loads(output.splitlines()[-1])
    assert code == 0, output
    assert received["received"] + received["lost"] == 200
    assert received["lost"] == sum(received["drops"].values())
    assert received["verified"] + received["overwritten"] == received["received"] > 0
    assert received["end"] == "timeout"


def test_a_wrong_byte_is_exit_code_1_and_named(shell: Shell, client: tp.Client) -> None:
    """One byte that is not what `checked` says ends `consume --verify`, with the frame and the offset."""
    pattern = Checked()
    with (
        client.producer("bytes/wrong", create=True) as producer,
        shell.start("consume", "bytes/wrong", "--verify", "--count", "20") as consumer,
    ):
        assert producer.wait_for_consumers(1, 30)
        for _ in range(20):
            with producer.claim((100, 100)) as slot:
                pattern.paint(slot.array, producer.next_seq)
                if producer.next_seq == 7:
                    slot.array[12, 34] ^= 0xFF
        code, output = consumer.finish()
    assert code == 1, output
    assert re.search(r"error: frame 7 \(epoch \d+\) is wrong: byte 1234 is 0x\w\w instead of 0x\w\w", output), output
    assert "only frames of `produce --pattern checked`" in output
    assert "verified 7 frames" in output


def test_nothing_within_the_timeout_is_exit_code_1(shell: Shell, client: tp.Client) -> None:
    """An unknown name, a stream that does not exist, and one that is silent: each says which it is."""
    for stream, words in (
        ("nobody", "no producer announces the name 'nobody'"),
        ("29999", "stream 29999 does not exist"),
    ):
        code, output = shell.run_here("consume", stream, "--timeout", "1.5")
        assert code == 1
        assert words in output.splitlines()[-1]
    with client.producer("silent", create=True):
        code, output = shell.run_here("consume", "silent", "--timeout", "1.5")
    assert code == 1
    assert "received 0 frames" in output
    assert "error: no frame arrived within 1.5 s" in output


def test_fewer_frames_than_asked_for_is_exit_code_1(shell: Shell, client: tp.Client) -> None:
    """A stream that falls silent before --count says how many came."""
    with (
        client.producer("short", create=True) as producer,
        shell.start("consume", "short", "--count", "9", "--timeout", "4") as consumer,
    ):
        assert producer.wait_for_consumers(1, 30)
        for _ in range(3):
            producer.publish(np.zeros(8))
        code, output = consumer.finish()
    assert code == 1
    assert "3 of 9 frames arrived, then none for 4 s" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_in_order(shell: Shell, client: tp.Client, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C: a summary, exit code 0, and the leases are given back."""
    name = f"signal/{number.name}"
    with (
        shell.start("consume", name, "--timeout", "60") as consumer,
        shell.start("produce", name, "--shape", "64x64", "--timeout", "60") as producer,
    ):
        wait_for_line(consumer, "consuming stream")
        wait_for_line(producer, "producing stream")
        consumer.send(number)
        code, output = consumer.finish()
        assert code == 0, output
        assert re.search(r"^received \d+ frames", output, re.MULTILINE), output
        producer.send(number)
        code, output = producer.finish()
        assert code == 0, output
        assert re.search(r"^published \d+ frames", output, re.MULTILINE), output
    client.producer(name, create=True, timeout=1.9).close()  # less than a lease takes to expire


def test_the_ring_of_a_new_stream_holds_two_seconds(shell: Shell, client: tp.Client) -> None:
    """So that a recorder that starts, or a slow disk, loses no frame; where there is room for it."""
    with shell.start("produce", "deep", "--shape", "16x16", "--rate", "200") as producer:
        wait_for_line(producer, "producing stream")
        with client.watch("deep", timeout=60) as watch:
            (epoch,) = watch.epochs
            assert epoch.regions.ring == RingSpec(512, (PoolSpec(1, 256),))
    config, size = client.config, RingSpec(32, (PoolSpec(1, 1024),)).size_bytes
    for most, slots in ((2 * size, 60), (size, 32), (size - 1, 16), (size // 4, None)):
        policies = msgspec.structs.replace(config.policies, max_provisioned_stream_bytes=most)
        ring = ring_for(msgspec.structs.replace(config, policies=policies), 1000, 30)
        assert (None if ring is None else ring.slots) == slots


@pytest.mark.parametrize(
    "arguments", [["consume", "never", "--timeout", "0"], ["limit", "never", "--to", "slow", "--rate", "5"]]
)
def test_a_signal_ends_what_has_not_begun(shell: Shell, arguments: list[str]) -> None:
    """A command that waits for a producer says so, and can be stopped with exit code 0."""
    with shell.start(*arguments) as waiting:
        assert waiting.read_line() == "waiting for never: no producer, or no lease of the driver, so far"
        waiting.send(signal.SIGTERM)
        assert waiting.finish() == (0, "stopped before it began\n")


def test_a_consumer_takes_the_newest_or_no_more_than_a_rate(shell: Shell) -> None:
    """--latest and --max-rate-hz take some frames, pass over the others, and say so."""
    with shell.start("produce", "sampled", "--shape", "16x16", "--rate", "200") as producer:
        wait_for_line(producer, "producing stream")
        for options, reason in (["--latest"], "SKIPPED"), ([], "RATE_LIMITED"):
            arguments = ["consume", "sampled", "--max-rate-hz", "20", *options]
            code, output = shell.run_here(*arguments, "--count", "10", "--json")
            assert code == 0, output
            summary = json.loads(output.splitlines()[-1])
            assert summary["received"] == 10
            assert summary["drops"][reason] > 10
            assert summary["rate_hz"] < 25
            code, output = shell.run_here(*arguments, "--count", "2")
            words = reason.lower()
            assert re.search(rf"^skipped  \d+: {words} \d+, as requested$", output, re.MULTILINE), output


def test_what_cannot_be_produced_is_refused_before_it_begins(shell: Shell, client: tp.Client) -> None:
    """A frame that fits no pool, a stream that must not be created, one that is taken: one line and exit code 1."""
    client.producer("small", create=True).close()
    with client.producer("taken", create=True) as producer:
        taken = str(producer.stream_id)
        for arguments, words in (
            (["produce", "small", "--shape", "1000x1000", "--no-create"], "a frame of 1000000 bytes fits no pool of"),
            (["produce", "20001", "--no-create", "--timeout", "1.5"], "stream 20001 does not exist"),
            (["produce", taken, "--timeout", "1.5"], f"stream {taken} already has a producer"),
            (["produce", "any", "--aeron-dir", "/dev/shm/tp-test-nowhere"], "no media driver is alive"),
            (["consume", "any", "--set", "shm.base_dirr=/x"], "shm.base_dirr"),
        ):
            code, output = shell.run_here(*arguments)
            assert code == 1, arguments
            assert words in output
            assert output.count("\n") == 1, output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["produce"], "Missing argument 'STREAM'"),
        (["produce", "x", "--shape", "3x"], "give 1 to 8 positive extents"),
        (["produce", "x", "--dtype", "complex64"], "'complex64' is not one of"),
        (["produce", "x", "--pattern", "stripes"], "'stripes' is not one of"),
        (["produce", "x", "--rate", "nan"], "'--rate': 'nan' is no number"),
        (["consume", "x", "--max-rate-hz", "0"], "--max-rate-hz"),
        (["limit", "x", "--to", "y", "--rate", "inf"], "'--rate': 'inf' is no number"),
        (["limit", "x", "--to", "x", "--rate", "5"], "--to x: give another stream than SOURCE"),
    ],
)
def test_a_wrong_command_line_names_what_is_accepted(shell: Shell, arguments: list[str], words: str) -> None:
    """Exit code 2, and what would do."""
    code, output = shell.run_here(*arguments)
    assert code == 2
    assert words in output


def test_a_producer_that_loses_its_driver_says_so_and_goes_on() -> None:
    """The driver ends and another comes: `produce` tells both, counts what it dropped, and publishes again."""
    config = {"policies.announce_period_ms": 500, "policies.shutdown_timeout_ms": 100}
    with tp.local(overrides=config) as first:
        shell = Shell(first)
        settings = [f"--set={key}={value}" for key, value in config.items()]
        with shell.start("produce", "survivor", "--shape", "64", "--rate", "100", *settings) as producer:
            wait_for_line(producer, "producing stream")
            first.shut_down(text="maintenance")
            wait_for_line(producer, "waiting: ")
            wait_until(lambda: not first.is_running, "the first driver has ended")
            with tp.Driver(first.config, aeron_dir=first.aeron_dir):
                wait_for_line(producer, "attached, epoch ")
                producer.send(signal.SIGTERM)
                code, output = producer.finish()
    assert code == 0, output
    assert re.search(r"^published \d+ frames", output, re.MULTILINE), output
    assert re.search(r"^dropped (\d+): detached \1$", output, re.MULTILINE), output


@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_shows_one_live_line_that_fits(shell: Shell, columns: int) -> None:
    """On a terminal the figures are redrawn in place, cut to its width; elsewhere there are none."""
    name = f"terminal/{columns}"
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorpool", "produce", name, "--count", "60", "--rate", "60", "--shape", "64x64"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=terminal_environment() | dict(shell.environment),
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait(120) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.startswith(name + "  ")]
    assert lines
    assert max(map(len, lines)) <= columns
    assert ("…" in lines[-1]) is (columns == 40)
    assert "published 60 frames" in plain
    _, output = shell.run_here("produce", name, "--count", "60", "--rate", "0", "--shape", "64x64")
    assert len(output.splitlines()) == 3, output


def test_limit_publishes_a_slower_copy(shell: Shell, client: tp.Client) -> None:
    """What a consumer of the copy gets is what the limiter says; every byte of it is right."""
    with (
        shell.start("produce", "limit/fast", "--rate", "100", "--pattern", "checked", "--shape", "32x32") as producer,
        shell.start("limit", "limit/fast", "--to", "limit/slow", "--rate", "20", "--json") as limiter,
    ):
        wait_until(lambda: client.discover("limit/slow"), "there is a copy")
        consumed = shell.run("consume", "limit/slow", "--count", "10", "--verify", "--json")
        limiter.send(signal.SIGTERM)
        code, output = limiter.finish()
        bounded = shell.run("limit", "limit/fast", "--to", "limit/few", "--rate", "20", "--count", "3", "--json")
        producer.send(signal.SIGTERM)
    assert code == 0, output
    counts = json.loads(output.splitlines()[-1])
    assert counts["published"] >= 10
    assert counts["skipped"] > 0
    assert (bounded.code, json.loads(bounded.stdout.splitlines()[-1])["published"]) == (0, 3)
    assert consumed.code == 0, consumed.stderr
    assert json.loads(consumed.stdout.splitlines()[-1])["verified"] == 10
