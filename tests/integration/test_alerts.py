# SPDX-License-Identifier: Apache-2.0
"""dashboards/alerts.yml against metrics of real processes: silent while all is well, each alert fires for its cause.

The processes are scraped once a second; a recorded second counts as ten, so that `for: 1m` takes six.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.shm.by_hand import mounted
from tests.support.processes import ROOT, Process, wait_until
from tests.support.promql import Alert, Recording, alerts, fired

ALERTS: Final = alerts(yaml.safe_load((ROOT / "dashboards/alerts.yml").read_text()))
STRETCH: Final = 10.0
WELL_S, TROUBLE_S = 14.0, 40.0  # recorded
HZ: Final = 20
STREAMS: Final = {"steady": 1000, "hung": 1001, "short": 1002, "flapping": 1003, "taken": 1004, "far": 1005}

PRODUCER: Final = f"""
import sys, time, numpy as np, tensorpool as tp
aeron_dir, config, stream, life_s = sys.argv[1:5]
with tp.connect(aeron_dir, config=config) as client:
    while True:
        with client.producer(int(stream), timeout=60) as producer:
            end_s = time.monotonic() + float(life_s)
            while time.monotonic() < end_s:
                producer.publish(np.zeros(1000, np.uint8))
                time.sleep(1 / {HZ})
"""
CONSUMER: Final = """
import sys, time, tensorpool as tp
aeron_dir, config, stream, pause_s = sys.argv[1:5]
with tp.connect(aeron_dir, config=config) as client, client.consumer(int(stream), timeout=60) as consumer:
    while True:
        consumer.poll(1)
        time.sleep(float(pause_s))
"""


class Site:
    """Processes, where they serve their metrics, and what was scraped of them."""

    def __init__(self, folder: Path, lake: Path, regions: Path) -> None:
        self.folder, self.lake, self.regions = folder, lake, regions
        self.aeron_dir = str(folder / "aeron")
        self.config = folder / "driver.toml"
        self.config.write_text(_driver_file(regions))
        self.recording = Recording()
        self._addresses: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def serve(self, name: str, *arguments: str, http: str = "--metrics") -> Process:
        """A service, once it serves its metrics."""
        place = ("--aeron-dir", self.aeron_dir)
        process = self._stack.enter_context(Process("-m", "tensorpool", *arguments, *place, http, "127.0.0.1:0"))
        lines = [process.read_line()]
        while not (match := re.search(r"http://(127\.0\.0\.1:\d+)/", lines[-1])):
            lines.append(process.read_line())
            assert lines[-1] or process.is_running, lines
        self._addresses[name] = match[1]
        threading.Thread(target=_drain, args=(process,), daemon=True).start()
        return process

    def run(self, script: str, stream: str, figure: float) -> Process:
        words = ("-c", script, self.aeron_dir, str(self.config), str(STREAMS[stream]), str(figure))
        return self._stack.enter_context(Process(*words))

    def bridge(self, name: str, role: str, source: str, destination: str, first_port: int = 24_401) -> Process:
        path = self.folder / f"{name}.toml"
        path.write_text(_bridge_file(name, role, self.config, (STREAMS[source], STREAMS[destination]), first_port))
        return self.serve(name, "bridge", "--config", str(path))

    def scrape(self) -> list[tuple[str, dict[str, str], float]]:
        found = []
        for name, address in self._addresses.items():
            text = None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as got:
                text = got.read().decode()
            for family in text_string_to_metric_families(text or ""):
                for sample in family.samples:
                    labels = {f"exported_{key}" if key == "instance" else key: it for key, it in sample.labels.items()}
                    found.append((sample.name, labels | {"job": "tensorpool", "instance": name}, sample.value))
        return found

    def record(self, seconds: float) -> tuple[float, float]:
        """Scrape for so long; when that was, stretched."""
        begin_s, begun = time.monotonic(), self.recording.scrapes[-1] + STRETCH if self.recording.scrapes else 0.0
        at = begun
        while time.monotonic() < begin_s + seconds:
            at = begun + STRETCH * (time.monotonic() - begin_s)
            self.recording.add(at, self.scrape())
            time.sleep(1.0)  # the interval of scrapes
        return begun, at

    def value(self, name: str, **labels: str) -> float | None:
        """The newest, of a scrape made now."""
        wanted = labels.items()
        return next((it for key, found, it in self.scrape() if key == name and wanted <= found.items()), None)

    def close(self) -> None:
        self._stack.close()


def _drain(process: Process) -> None:
    """Read what it logs: a pipe that is full would hold it up."""
    with contextlib.suppress(ValueError, OSError):  # closed with the process
        while process.read_line():
            pass


def _driver_file(regions: Path) -> str:
    slots = {"steady": 256, "hung": 64, "short": 8, "flapping": 8, "taken": 8, "far": 256}
    profiles = "".join(
        f"""
        [profiles.{name}]
        header_nslots = {slots[name]}
        payload_pools = [{{pool_id = 1, stride_bytes = 1024}}]
        [streams.{name}]
        stream_id = {stream_id}
        profile = "{name}"
        """
        for name, stream_id in STREAMS.items()
    )
    return f"""
        [driver]
        instance_id = "lab"
        [shm]
        base_dir = "{regions}"
        [policies]
        announce_period_ms = 500
        {profiles}
    """


def _bridge_file(name: str, role: str, driver: Path, mapping: tuple[int, int], first_port: int) -> str:
    channels = [f"aeron:udp?endpoint=127.0.0.1:{port}" for port in range(first_port, first_port + 3)]
    return f"""
        [bridge]
        instance_id = "{name}"
        role = "{role}"
        driver_config = "{driver}"
        payload_channel = "{channels[0]}"
        payload_stream_id = 50000
        control_channel = "{channels[1]}"
        control_stream_id = 1000
        metadata_channel = "{channels[2]}"
        metadata_stream_id = 1300
        [[mappings]]
        source_stream_id = {mapping[0]}
        dest_stream_id = {mapping[1]}
    """


def fill(folder: Path, share: float) -> None:
    """Take so much of what a mount has left."""
    import os

    left = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(int(left.f_bavail * left.f_frsize * share)))


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[Recording, tuple[float, float], tuple[float, float]]]:
    """The recording, and when all was well and when it was not."""
    from tests.support.processes import private_directory

    with (
        private_directory("tp-alerts-") as folder,
        mounted(folder / "regions", "tmpfs", "size=64m") as regions,
        mounted(folder / "lake", "tmpfs", "size=64m") as lake,
    ):
        site = Site(folder, lake, regions)
        try:
            yield _story(site)
        finally:
            site.close()


def _story(site: Site) -> tuple[Recording, tuple[float, float], tuple[float, float]]:
    config = str(site.config)
    site.serve("driver", "driver", "--config", config)
    site.serve("supervisor", "supervisor", "--config", config, http="--http")
    for stream in ("steady", "short", "taken"):
        site.run(PRODUCER, stream, 1e9)
    hung = site.run(PRODUCER, "hung", 1e9)
    site.run(CONSUMER, "steady", 0)
    receiver = site.bridge("receiver", "receiver", "steady", "far")
    site.bridge("sender", "sender", "steady", "far")
    lake = str(site.lake / "lake")
    words = ("record", str(STREAMS["steady"]), "--to", lake, "--direct", "--name", "r", "--config", config, "--no-sync")
    site.serve("recorder", *words)
    for stream in ("steady", "hung", "short", "far"):
        stream_id = str(STREAMS[stream])
        wait_until(
            functools.partial(site.value, "tensorpool_stream_rate_hertz", stream_id=stream_id), f"{stream} has a rate"
        )
    wait_until(lambda: site.value("tensorpool_recorder_frames_total"), "the recorder commits")
    wait_until(lambda: site.value("tensorpool_bridge_frames_received_total"), "frames cross the bridge")
    well = site.record(WELL_S)

    hung.send(signal.SIGSTOP)
    receiver.reap()
    site.run(CONSUMER, "short", 2.0)
    site.run(PRODUCER, "flapping", 0.5)
    site.bridge("second", "receiver", "steady", "taken", first_port=24_411)
    fill(site.regions, 0.95)
    fill(site.lake, 0.95)
    _command(site, "pause")
    trouble = site.record(TROUBLE_S)
    _command(site, "resume")
    wait_until(lambda: site.value("tensorpool_recorder_lost_frames_total"), "the recorder counts what the ring forgot")
    return site.recording, well, (trouble[0], site.record(2.5)[1])


def _command(site: Site, word: str) -> None:
    send = ("-m", "tensorpool", "event", "send", "service:recorder:r", word, "--aeron-dir", site.aeron_dir)
    with Process(*send, "--timeout", "60", "--config", str(site.config)) as sender:
        code, output = sender.finish()
        assert code == 0, output


def _times(span: tuple[float, float]) -> list[float]:
    return [span[0] + 10.0 * step for step in range(int((span[1] - span[0]) // 10) + 1)]


CAUSES: Final[dict[str, dict[str, str]]] = {
    "TensorpoolServiceUnwell": {"service": "bridge", "instance_id": "second"},
    "TensorpoolStreamStopped": {"stream_id": str(STREAMS["hung"])},
    "TensorpoolConsumerLosing": {"stream_id": str(STREAMS["short"])},
    "TensorpoolLeaseFlapping": {"stream_id": str(STREAMS["flapping"])},
    "TensorpoolMemoryNearlyFull": {"use": "regions", "instance": "driver"},
    "TensorpoolDiskNearlyFull": {"use": "lake", "instance": "recorder"},
    "TensorpoolBridgeLoss": {"instance": "sender", "mapping": f"{STREAMS['steady']}->{STREAMS['far']}"},
    "TensorpoolBridgeDown": {"instance": "second"},
    "TensorpoolRecorderLag": {"instance": "recorder"},
    "TensorpoolRecorderLosing": {"instance": "recorder", "stream": str(STREAMS["steady"])},
}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_is_silent_while_all_is_well_and_fires_for_its_cause(alert: Alert, recorded: Any) -> None:
    """And names what is in trouble by its labels."""
    recording, well, trouble = recorded
    assert not fired(alert, recording, _times(well))
    found = fired(alert, recording, _times((well[0], trouble[1])))
    causes = [labels for firing in found.values() for labels in firing]
    assert any(CAUSES[alert.name].items() <= labels.items() for labels in causes), f"{alert.name}: {causes}"


def test_the_dashboard_asks_drivers_and_recorders_for_metrics_that_they_have(recorded: Any) -> None:
    """And for labels that these have."""
    known: dict[str, set[str]] = {}
    for labels in recorded[0].series:
        known.setdefault(dict(labels)["__name__"], set()).update(dict(labels))
    panels = json.loads((ROOT / "dashboards/tensorpool.json").read_text())["panels"]
    asked = 0
    for target in (target for panel in panels for target in panel.get("targets", [])):
        names = re.findall(r"tensorpool_(?:recorder|space|driver)_\w+", target["expr"])
        for name in names:
            asked += 1
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known[name], target
    assert asked >= 7


def test_every_alert_has_its_cause_here_and_says_what_to_do() -> None:
    """A rule that is added without a cause that was tried fails here."""
    assert {alert.name for alert in ALERTS} == CAUSES.keys()
    rules = yaml.safe_load((ROOT / "dashboards/alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
