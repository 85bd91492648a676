# SPDX-License-Identifier: Apache-2.0
"""Every service as an operator's tools see it: systemd's socket, /metrics and /healthz; real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.shm.by_hand import mounted
from tests.support.processes import Process, run_script, wait_until

PERIOD_S: Final = 1.5  # of the watchdog
SERVED: Final = re.compile(r"http://([\d.]+:\d+)/(?:metrics|view)")
# What each service's metrics have beside those that all have.
OWN: Final = {
    "driver": {"tensorpool_driver_leases", "tensorpool_space_free_bytes", "tensorpool_aeron_total"},
    "media-driver": {"tensorpool_aeron_total", "tensorpool_space_free_bytes"},
    "bridge": {"tensorpool_bridge_ready"},
    "supervisor": {"tensorpool_supervisor_connected"},
    "console": {"tensorpool_console_previews"},
    "recorder": {"tensorpool_recorder_lag_frames", "tensorpool_recorder_frames_total", "tensorpool_space_free_bytes"},
    "discovery": {"tensorpool_registry_drivers"},
}


class Service:
    """A process that believes itself to be started by systemd."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / f"notify-{arguments[0]}"))
        self._socket.settimeout(90)
        self.received: list[str] = []
        environment = {"NOTIFY_SOCKET": self._socket.getsockname(), "WATCHDOG_USEC": str(int(PERIOD_S * 1e6))}
        self.process = Process("-m", "tensorpool", *arguments, **environment)
        self.lines: list[str] = []

    def wait_for(self, word: str) -> str:
        """The next message that begins with it."""
        while True:
            message = self._socket.recv(4096).decode()
            self.received.append(message)
            if message.startswith(word):
                return message

    def beats(self, seconds: float) -> int:
        """How many signs of life arrive in so long."""
        count, end_s = 0, time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                count += self._socket.recv(4096) == b"WATCHDOG=1"
        self._socket.settimeout(90)
        return count

    def http(self) -> str:
        """Where it serves, as it prints."""
        while not (match := SERVED.search(self.lines[-1] if self.lines else "")):
            self.lines.append(self.process.read_line())
            assert self.lines[-1] or self.process.is_running, self.lines
        return match[1]

    def ask(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.http()}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        self.process.reap()
        self._socket.close()


@pytest.fixture
def start(shm_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def run(*arguments: str) -> Service:
        started.append(Service(tmp_path, *arguments, "--aeron-dir", str(shm_dir / "aeron")))
        return started[-1]

    yield run
    for service in reversed(started):
        service.close()


@pytest.fixture
def driver_file(shm_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "driver.toml"
    path.write_text(
        f"""
        [driver]
        instance_id = "lab"
        [shm]
        base_dir = "{shm_dir}/shm"
        [profiles.small]
        header_nslots = 8
        payload_pools = [{{pool_id = 1, stride_bytes = 4096}}]
        [streams.cam]
        stream_id = 1000
        profile = "small"
        """
    )
    return path


def arguments_of(service: str, driver_file: Path, tmp_path: Path) -> list[str]:
    """A command line that runs it beside the driver."""
    metrics = ["--metrics", "127.0.0.1:0"]
    if service == "bridge":
        endpoint = "aeron:udp?endpoint=127.0.0.1:"
        (tmp_path / "bridge.toml").write_text(
            f"""
            [bridge]
            instance_id = "b"
            role = "sender"
            driver_config = "{driver_file}"
            payload_channel = "{endpoint}24371"
            payload_stream_id = 50000
            control_channel = "{endpoint}24372"
            control_stream_id = 1000
            metadata_channel = "{endpoint}24373"
            metadata_stream_id = 1300
            [[mappings]]
            source_stream_id = 1000
            dest_stream_id = 2000
            """
        )
        return ["bridge", "--config", str(tmp_path / "bridge.toml"), *metrics]
    if service == "discovery":
        (tmp_path / "registry.toml").write_text(
            """
            [discovery]
            instance_id = "registry"
            channel = "aeron:ipc?term-length=4m"
            stream_id = 7000
            [[discovery.drivers]]
            instance_id = "lab"
            control_channel = "aeron:ipc?term-length=4m"
            control_stream_id = 1000
            """
        )
        return ["discovery", "--config", str(tmp_path / "registry.toml"), *metrics]
    if service == "supervisor":
        return ["supervisor", "--http", "127.0.0.1:0", "--config", str(driver_file)]
    if service == "recorder":
        lake = str(tmp_path / "lake")
        return ["record", "1000", "--to", lake, "--direct", "--name", "r", "--config", str(driver_file), *metrics]
    return [service, "--config", str(driver_file), *metrics]


@pytest.mark.parametrize("service", OWN)
def test_a_service_reports_ready_alive_and_stopping_and_serves_metrics_and_health(
    service: str, start: Callable[..., Service], driver_file: Path, tmp_path: Path
) -> None:
    """READY=1 once it serves, WATCHDOG=1 while it turns, STOPPING=1 when it ends; its metrics carry its name."""
    if service not in ("driver", "media-driver"):
        start("driver", "--config", str(driver_file)).wait_for("READY=1")
    it = start(*arguments_of(service, driver_file, tmp_path))
    it.wait_for("READY=1")
    it.wait_for("WATCHDOG=1")
    wanted = OWN[service] | {"tensorpool_build_info", "tensorpool_healthy", "process_resident_memory_bytes"}
    found: set[str] = set()

    def has_all() -> bool:
        status, text = it.ask("/metrics")
        assert status == 200, text
        families = list(text_string_to_metric_families(text))
        samples = [sample for family in families for sample in family.samples]
        (build,) = [sample for sample in samples if sample.name == "tensorpool_build_info"]
        assert build.labels["service"] == service
        found.update(sample.name for sample in samples)
        return wanted <= found

    wait_until(has_all, f"it has {wanted}")
    healthy = (200, {"status": "ok", "trouble": None})

    def health() -> tuple[int, dict[str, object]]:
        status, text = it.ask("/healthz")
        return status, json.loads(text)

    if service == "bridge":  # nothing answers at the other end, but its own mapping has its lease
        wait_until(lambda: health()[0] in (200, 503), "it answers")
    else:
        wait_until(lambda: health() == healthy, "it is well")
    it.process.send(signal.SIGTERM)
    it.wait_for("STOPPING=1")
    code, output = it.process.finish()
    assert code == 0, output


def test_a_reload_is_reported_and_a_wedged_duty_cycle_gets_no_watchdog_beat(
    start: Callable[..., Service], driver_file: Path, shm_dir: Path
) -> None:
    """SIGHUP: RELOADING=1 with its time, then READY=1. A conductor that hangs in a read of its file is found out.

    The file is replaced by a pipe that nobody writes to, and the command `reload` makes the conductor open it: the main
    thread goes on, but no sign of life is sent and /healthz answers 503, until the conductor turns again.
    """
    it = start("driver", "--config", str(driver_file), "--metrics", ":0")
    it.wait_for("READY=1")
    it.process.send(signal.SIGHUP)
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", it.wait_for("RELOADING=1"))
    it.wait_for("READY=1")
    it.wait_for("WATCHDOG=1")

    text = driver_file.read_text()
    pipe = driver_file.with_suffix(".pipe")
    os.mkfifo(pipe)
    os.rename(pipe, driver_file)
    aeron_dir = str(shm_dir / "aeron")
    send = ("-m", "tensorpool", "event", "send", "service:driver:lab", "reload", "--aeron-dir", aeron_dir)
    with Process(*send, "--timeout", "60") as sender:
        wait_until(lambda: it.ask("/healthz")[0] == 503, "it is not well")
        assert "the duty cycle stands still" in it.ask("/healthz")[1]
        it.beats(0.2)  # what was sent before
        assert it.beats(2 * PERIOD_S) == 0
        assert it.process.is_running
        driver_file.write_text(text)
        sender.finish()
    it.wait_for("WATCHDOG=1")
    wait_until(lambda: it.ask("/healthz")[0] == 200, "it is well again")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:9000", "a loopback address, or give --metrics-allow-remote too"),
        ("9000", "HOST:PORT"),
        ("127.0.0.1:x", "a port from 0 to 65535"),
    ],
)
@pytest.mark.parametrize("service", ["driver", "media-driver", "console", "bridge", "discovery", "record"])
def test_metrics_are_served_on_loopback_unless_allowed(service: str, address: str, words: str) -> None:
    """One rule for all of them, checked before anything starts."""
    from click.testing import CliRunner

    from tensorpool.cli.main import group
    from tensorpool.errors import ConfigError

    needed = {"record": ["1", "--to", "lake"], "bridge": ["--config", "b"], "discovery": ["--config", "d"]}
    result = CliRunner().invoke(group, [service, *needed.get(service, []), "--metrics", address])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_an_allowed_address_is_served_to_others(start: Callable[..., Service], driver_file: Path) -> None:
    """Under any name, since nothing is known of how other hosts call it."""
    it = start("driver", "--config", str(driver_file), "--metrics", "0.0.0.0:0", "--metrics-allow-remote")
    it.wait_for("READY=1")
    host, _, port = it.http().partition(":")
    assert host == "0.0.0.0"
    request = urllib.request.Request(f"http://127.0.0.2:{port}/healthz", headers={"Host": "lab.example:9464"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_a_recorder_that_starts_on_a_full_disk_says_so(
    start: Callable[..., Service], driver_file: Path, shm_dir: Path
) -> None:
    """In one line, with what to do; systemd starts it again."""
    start("driver", "--config", str(driver_file)).wait_for("READY=1")
    with mounted(shm_dir / "disk", "tmpfs", "size=1m") as disk:
        (disk / "lake").mkdir()
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        it = start("record", "1000", "--to", str(disk / "lake"), "--direct", "--config", str(driver_file))
        code, output = it.process.finish()
    assert code == 1
    assert "error: lake " in output
    assert "No space left on device; make room, or record elsewhere" in output
    assert "Traceback" not in output


def test_nothing_is_loaded_for_metrics_that_are_not_served() -> None:
    """prometheus_client takes longer to import than the rest of a media driver."""
    code, output = run_script("import sys, tensorpool.cli.driver; print('prometheus_client' in sys.modules)")
    assert (code, output.strip()) == (0, "False"), output
