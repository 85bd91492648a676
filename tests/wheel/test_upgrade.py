# SPDX-License-Identifier: Apache-2.0
"""Driver and clients of two versions: the wheel of an earlier commit and this source, in both orders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.old_version import OLD, install_old, old_python
from tests.support.processes import ROOT, private_directory, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
NEW: Final = "this source"
PAIRS: Final = ((OLD, NEW), (NEW, OLD))
FRAMES: Final = 300
CHECKED: Final = ("--shape", "64x64", "--pattern", "checked")


@pytest.fixture(scope="module")
def old_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the old version, built as its own wheel is."""
    return install_old(tmp_path_factory.mktemp("old"))


class Host:
    """Where commands of either version meet."""

    def __init__(self, folder: Path, old_path: Path) -> None:
        self.aeron_dir = str(folder / "aeron")
        self._old_path = old_path
        self._environment = os.environ | {"AERON_DIR": self.aeron_dir, "SHM_BASE_DIR": str(folder / "shm")}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, version: str, *words: str) -> subprocess.Popen[str]:
        """A command of that version."""
        python, path = old_python(self._old_path) if version == OLD else (sys.executable, str(ROOT))
        self._started.append(
            subprocess.Popen(
                [python, "-m", "tensorpool", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment | {"PYTHONPATH": path},
            )
        )
        return self._started[-1]

    def run(self, version: str, *words: str) -> str:
        process = self.start(version, *words)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{version} {words}: {output}"
        return output

    def start_driver(self, version: str) -> subprocess.Popen[str]:
        driver = self.start(version, "driver", "--config", str(ROOT / "examples/driver/dynamic.toml"))
        read_until(driver, " serves ")
        return driver

    def close(self) -> None:
        for process in reversed(self._started):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"no {words!r} in {lines}")


@pytest.fixture
def host(old_path: Path) -> Iterator[Host]:
    with private_directory("tp-upgrade-") as folder:
        made = Host(folder, old_path)
        try:
            yield made
        finally:
            made.close()


def exchange(host: Host, producer: str, consumer: str, name: str) -> None:
    """Frames from one version to the other, every byte of each checked."""
    producing = host.start(producer, "produce", name, *CHECKED, "--rate", "200", "--timeout", "60")
    read_until(producing, "producing")
    output = host.run(consumer, "consume", name, "--verify", "--count", str(FRAMES), "--timeout", "60")
    assert f"verified {FRAMES} frames, every byte" in output, output
    exchange_ends(producing)


@pytest.mark.parametrize(("driver", "client"), PAIRS)
def test_clients_of_one_version_use_a_driver_of_the_other(driver: str, client: str, host: Host) -> None:
    """Attach, publish, receive, discover, inspect and command."""
    host.start_driver(driver)
    exchange(host, client, client, "camera/front")
    exchange(host, driver, client, "camera/left")
    exchange(host, client, driver, "camera/right")
    producing = host.start(driver, "produce", "camera/front", *CHECKED, "--rate", "50", "--timeout", "60")
    read_until(producing, "producing")
    wait_until(lambda: "camera/front" in host.run(client, "ls"), "the name is announced")
    assert "camera/front" in host.run(client, "inspect", "camera/front")
    assert "pong" in host.run(client, "event", "send", "service:driver:lab-a", "ping")


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_driver_is_replaced_by_another_version_while_clients_run(before: str, after: str, host: Host) -> None:
    """The upgrade of docs/operations.md, and the way back: producer and consumer attach again by themselves."""
    driver = host.start_driver(before)
    producing = host.start(before, "produce", "camera/front", *CHECKED, "--rate", "50")
    read_until(producing, "producing")
    consuming = host.start(after, "consume", "camera/front", "--verify", "--timeout", "0", "--count", "100000")
    read_until(consuming, "consuming")
    driver.terminate()
    driver.wait(60)
    assert driver.returncode == 0
    host.start_driver(after)

    def flows() -> bool:
        return "camera/front" in host.run(after, "ls") and "1 consumer" in _plain(host.run(after, "top", "--once"))

    wait_until(flows, "producer and consumer are attached to the other driver")
    exchange_ends(consuming)
    exchange_ends(producing)


def exchange_ends(process: subprocess.Popen[str]) -> None:
    process.terminate()
    output, _ = process.communicate(timeout=100)
    assert "is wrong" not in output, output
    assert process.returncode in (0, 1), output  # 1: fewer than --count


def _plain(text: str) -> str:
    return " ".join(text.split())
