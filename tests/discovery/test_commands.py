# SPDX-License-Identifier: Apache-2.0
"""`tensorpool ls` and `tensorpool discovery` as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import tensorpool as tp
from tensorpool.cli.main import group
from tests.support.driver_process import DriverProcess
from tests.support.processes import wait_until

REGISTRY = """
[[discovery.drivers]]
instance_id = "driver-01"
control_channel = "aeron:ipc?term-length=4m"
control_stream_id = 2000
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[tp.Local]:
    profile = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
    with tp.local(overrides={"profiles.default": profile, "policies.announce_period_ms": 300}) as pool:
        yield pool


def run(pool: tp.Local, *arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"AERON_DIR": pool.aeron_dir}).invoke(group, ["ls", *arguments])
    if isinstance(result.exception, tp.TensorPoolError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_ls_shows_a_table_or_json(pool: tp.Local) -> None:
    """Of what fits all filters."""
    with pool.connect() as client, client.producer("camera/front", create=True) as producer:
        producer.set_metadata({}, tags=["lab1", "x"])
        wait_until(lambda: client.discover("camera/front", tags=["lab1"]), "it is known")
        code, output = run(pool)
        assert code == 0
        row = next(line for line in output.splitlines() if "camera/front" in line)
        for text in (str(producer.stream_id), "lab1, x", str(producer.producer_id), "4 KiB", "driver-01"):
            assert text in row
        filters = ("--name", "camera/front", "--tag", "x", "--tag", "lab1", "--driver", "driver-01")
        numbers = ("--producer", str(producer.producer_id), "--stream", str(producer.stream_id))
        code, output = run(pool, "--json", *filters, *numbers)
        (stream,) = json.loads(output)
        assert stream["tags"] == ["lab1", "x"]
        assert stream["payload_pools"][0]["stride_bytes"] == 4096
        assert json.loads(run(pool, "--json", "--tag", "y")[1]) == []
        assert run(pool, "--name", "camera/rear") == (0, "no such stream\n")


def test_ls_says_what_is_wrong(pool: tp.Local, shm_dir: Path) -> None:
    """Exit code 1 for what cannot be done, 2 for a wrong command line."""
    assert run(pool, "--producer", "x")[0] == 2
    code, words = run(pool, "--set", "discovery.stream_id=2222", "--timeout", "0.2")
    assert (code, "stream 2222" in words) == (1, True)
    assert run(pool, "--aeron-dir", str(shm_dir))[0] == 1


def test_ls_starts_without_what_it_does_not_need() -> None:
    """Its help loads neither tables nor clients nor Spark."""
    names = "rich.table", "tensorpool.client", "pyspark"
    script = f"import sys, tensorpool.cli.ls; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_registry_is_checked_started_and_stopped(pool: tp.Local, tmp_path: Path) -> None:
    """`--check` starts nothing; SIGTERM ends in order."""
    path = tmp_path / "registry.toml"
    path.write_text(REGISTRY)
    checked = CliRunner().invoke(group, ["discovery", "--config", str(path), "--check", "--json"])
    settings = json.loads(checked.output)["settings"]
    assert settings["discovery.channel"] == "aeron:ipc?term-length=1m"
    path.write_text(REGISTRY.replace("2000", "0"))
    refused = CliRunner().invoke(group, ["discovery", "--config", str(path), "--check"])
    assert isinstance(refused.exception, tp.ConfigError)
    path.write_text(REGISTRY)
    with DriverProcess("-m", "tensorpool", "discovery", "--config", str(path), AERON_DIR=pool.aeron_dir) as registry:
        wait_until(lambda: "registry answers at" in registry.read_line(), "it is ready")
        registry.send(signal.SIGTERM)
        assert registry.finish()[0] == 0
    assert os.path.exists(pool.aeron_dir)  # the media driver was not its own
