# SPDX-License-Identifier: Apache-2.0
"""Places for tables: a directory, and a bucket of a server that speaks S3's protocol, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

WAIT_S = 60.0


@contextlib.contextmanager
def bucket_server(log: Path, address: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """Runs the server; gives the environment with which clients find it."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    with open(log, "wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", address, "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    endpoint = f"http://{address}:{port}"
    try:
        until_s = time.monotonic() + WAIT_S
        while not _answers(endpoint):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        server.terminate()
        server.wait(10)


def make_bucket(name: str, endpoint: str | None = None) -> None:
    """In a server, by default in the one that the environment names."""
    request = urllib.request.Request(f"{endpoint or os.environ['AWS_ENDPOINT_URL']}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=10):
        pass


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a server that runs for all tests."""
    with bucket_server(tmp_path_factory.mktemp("s3") / "log") as environment:
        yield environment


@pytest.fixture
def bucket(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, as s3://…"""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    name = f"lakes-{uuid.uuid4().hex[:12]}"
    make_bucket(name)
    return f"s3://{name}"


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new table can be: each test runs on a local disk and in a bucket."""
    if request.param == "local":
        return str(tmp_path / "table")
    bucket: str = request.getfixturevalue("bucket")
    return f"{bucket}/table"
