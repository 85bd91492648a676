# SPDX-License-Identifier: Apache-2.0
"""`tensorpool inspect`: a stream from outside, as text and as JSON, without a lease."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

import tensorpool as tp
from tests.cli.conftest import Shell
from tests.support.processes import wait_until


@pytest.fixture
def producer(client: tp.Client) -> Iterator[tp.Producer]:
    """With ten frames, 10 ms apart by their stamps."""
    with client.producer("inspect/one", create=True) as producer:
        producer.set_metadata({"exposure_ms": 4}, tags=["lab1"])
        start_ns = time.monotonic_ns()
        for index in range(10):
            assert producer.publish(np.zeros((6, 8), np.float32), timestamp_ns=start_ns + index * 10_000_000) == index
        wait_until(lambda: client.discover("inspect/one"), "its name is known")
        yield producer


def test_a_stream_is_shown_with_all_that_is_known(shell: Shell, client: tp.Client, producer: tp.Producer) -> None:
    """Layout, epoch, slots, rate, leases, consumers and files; afterwards no lease more is held than before."""
    with client.consumer("inspect/one") as consumer:
        leases = shell.pool.conductor.lifecycle.leases
        held = {lease.lease_id for lease in leases}
        code, output = shell.run_here("inspect", "inspect/one", "--json", "--seconds", "2.5")
        assert {lease.lease_id for lease in leases} == held
        found = json.loads(output)
        assert code == 0
        assert (found["stream_id"], found["name"], found["tags"]) == (producer.stream_id, "inspect/one", ["lab1"])
        assert (found["reported_by"], found["problems"], found["layout"]["nslots"]) == ("discovery", [], 64)
        assert [pool["stride_bytes"] for pool in found["layout"]["pools"]] == [1 << 12, 1 << 18]
        assert (found["slots"]["committed"], found["slots"]["never_written"]) == (10, 54)
        assert (found["slots"]["oldest_seq"], found["slots"]["newest_seq"]) == (0, 9)
        assert found["slots"]["rate_hz"] == pytest.approx(100)
        assert found["slots"]["newest"]["shape"] == [6, 8]
        assert [epoch["state"] for epoch in found["epochs"] if epoch["epoch"] == found["epoch"]] == ["current"]
        ring = found["regions"][0]
        assert (ring["superblock"]["region_type"], ring["is_owner_alive"], ring["problem"]) == ("HEADER_RING", True, "")
        assert {lease["role"] for lease in found["leases"]} == {"PRODUCER", "CONSUMER"}
        assert [each["consumer_id"] for each in found["consumers"]] == [consumer.consumer_id]
        assert found["status"]["meta_version"] == 1

        code, output = shell.run_here("inspect", str(producer.stream_id), "--seconds", "2.5")
        assert code == 0
        for line in (
            rf"^inspect/one  stream {producer.stream_id}  driver driver-01  tags lab1$",
            r"^  layout     64 slots; pools 1: 4 KiB, 2: 256 KiB; version 1; 16\.\d MiB an epoch$",
            r"^  metadata   version 1; ",
            r"^  slots      10 committed, 0 being written, 54 never written$",
            r"^  frames     last seq 9, oldest 0; 90 ms at 100\.0 Hz, a full ring holds 640 ms$",
            r"^             6x8 float32, 192 B in pool 1, stamped ",
            rf"^  leases     producer client {found['producer_id']}, lease \d+, expires in ",
            rf"^  consumers  {consumer.consumer_id} \w+: lag ",
            r"^  regions    header ring  /dev/shm/\S+/header\.ring  0660 root:root  16\.1 KiB ",
            r"^               written by pid \d+ \(running\), last activity ",
        ):
            assert re.search(line, output, re.MULTILINE), (line, output)


def test_what_is_not_there_is_answered_with_what_is(shell: Shell, producer: tp.Producer) -> None:
    """Exit code 1 and one line: the candidates, the most alike first."""
    code, output = shell.run_here("inspect", "inspect/won")
    assert code == 1
    assert output.startswith("error: there is no stream 'inspect/won' (as discovery says); did you mean inspect/one")
    assert f"inspect/one ({producer.stream_id} of driver-01)" in output
    assert output.count("\n") == 1
    code, output = shell.run_here("inspect", "0")
    assert (code, output) == (1, "error: stream 0: expected a name, or an id from 1 to 2^32 - 2\n")


def test_where_nothing_runs_it_says_so_at_once(shell: Shell) -> None:
    """No media driver: one line, and what to start."""
    code, output = shell.run_here("inspect", "x", "--aeron-dir", "/dev/shm/tp-test-nothing-here")
    assert code == 1
    assert "no media driver is alive at /dev/shm/tp-test-nothing-here; start one" in output
