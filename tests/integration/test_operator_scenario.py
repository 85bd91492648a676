# SPDX-License-Identifier: Apache-2.0
"""A scene with five streams and twelve consumers, as an operator sees it.

    front ─► bridge ══UDP══► bridge ─► far      rear      side      lidar

One consumer is slow, one is frozen for a while (SIGSTOP), the producer of `rear` is killed and comes back, the bridge
is paused by an event.

Every part is a process of its own that says, when asked, what is true of itself. At each step the supervisor's /view
has to become what they say, and `top`, `inspect` and `doctor` have to show it. At the end everything is at rest, and
every number is equal.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from tensorpool.cli.main import group
from tests.support.processes import Process, private_directory, wait_until

NAMES: Final = ("front", "rear", "side", "lidar", "far")
IDS: Final = range(9000, 9100)
BRIDGE: Final = ("service:bridge:sender", "service:bridge:receiver")
PERIOD_MS: Final = 500
HZ: Final = 40

# A process with producers and consumers in threads. It answers each line on stdin with a line of JSON.
HOST: Final = """
import json, sys, threading, time
import numpy as np
import tensorpool as tp

aeron_dir, config = sys.argv[1], sys.argv[2]
produced, consumed = (json.loads(text) for text in sys.argv[3:5])
is_held, is_over = threading.Event(), threading.Event()
client = tp.connect(aeron_dir, config=config)
producers = {name: client.producer(f"lab/{name}", create=True, timeout=60) for name in produced}
last = {}

def publish(name, producer):
    frame = np.zeros((16, 16), np.float32)
    while not is_over.wait(1 / HZ):
        if not is_held.is_set():
            seq = producer.publish(frame)
            if seq is not None:
                last[name] = seq

class Reader:
    def __init__(self, stream_id, pause_s):
        self.consumer = client.consumer(stream_id, timeout=60)
        self.pause_s = pause_s
        self.seq = None
    def run(self):
        while not is_over.is_set():
            frame = self.consumer.poll(timeout=0.2)
            if frame is not None:
                self.seq = frame.seq
                if self.pause_s and not is_held.is_set():
                    is_over.wait(self.pause_s)
    def report(self):
        consumer, stats = self.consumer, self.consumer.stats
        return {
            "stream_id": consumer.stream_id, "consumer_id": consumer.consumer_id, "epoch": consumer.epoch,
            "last_seq": self.seq, "drops_gap": stats.drops_gap, "drops_late": stats.drops_late,
            "mode": consumer.mode.name, "is_slow": bool(self.pause_s), "is_active": consumer.is_active,
        }

readers = [Reader(*wanted) for wanted in consumed]
threads = [threading.Thread(target=publish, args=item, daemon=True) for item in producers.items()]
threads += [threading.Thread(target=reader.run, daemon=True) for reader in readers]
for thread in threads:
    thread.start()
for line in sys.stdin:
    word = line.strip()
    if word == "hold":
        is_held.set()
    elif word == "go":
        is_held.clear()
    print(json.dumps({
        "producers": {
            str(it.stream_id): {
                "name": name, "producer_id": it.producer_id, "epoch": it.epoch, "seq": last.get(name),
            }
            for name, it in producers.items()
        },
        "consumers": [reader.report() for reader in readers],
    }), flush=True)
is_over.set()
for thread in threads:
    thread.join()
client.close()
""".replace("HZ", str(HZ))


class Scene:
    """The place: files, processes, and what an operator types."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.aeron_dir = str(folder / "aeron")
        self.driver_file = folder / "driver.toml"
        self.driver_file.write_text(_driver_file(folder))
        self.ids: dict[str, int] = {}  # of streams, by name
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, Process] = {}
        self.http = ""

    def start(self, *arguments: str) -> Process:
        """A command of ours."""
        return self._stack.enter_context(
            Process("-m", "tensorpool", *arguments, "--aeron-dir", self.aeron_dir, "--log-level", "error")
        )

    def start_host(self, name: str, produces: Sequence[str] = (), consumes: Sequence[tuple[str, float]] = ()) -> None:
        """Producers and consumers in a process; consumers are (stream, seconds to pause after each frame)."""
        consumed = json.dumps([(self.ids[stream], pause_s) for stream, pause_s in consumes])
        arguments = (self.aeron_dir, str(self.driver_file), json.dumps(produces), consumed)
        self.hosts[name] = self._stack.enter_context(Process("-c", HOST, *arguments))
        if produces:
            self.ids |= {status["name"]: int(id) for id, status in self.ask(name)["producers"].items()}

    def start_bridge(self) -> None:
        """Both ends, from front to far, which gets an unused id."""
        self.ids["far"] = next(id for id in IDS if id not in self.ids.values())
        file = self.folder / "bridge.toml"
        file.write_text(_bridge_file(self.driver_file, self.ids["front"], self.ids["far"]))
        ends = [
            self.start(
                "bridge", "--config", str(file), "--set", f"bridge.role={role}", "--set", f"bridge.instance_id={role}"
            )
            for role in ("receiver", "sender")
        ]
        for end in ends:
            said = [""]
            while not said[-1].endswith("ready"):
                said.append(end.read_line())
                assert said[-1], f"the bridge ended: {said}"

    def ask(self, name: str, word: str = "report") -> dict[str, Any]:
        """What a host says of itself."""
        host = self.hosts[name]
        host.write_line(word)
        while not (line := host.read_line()).startswith("{"):  # what it logs comes the same way
            assert line, f"{name} ended"
        return dict(json.loads(line))

    def truth(self, *names: str) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """Producers by stream id and consumers by their id, of these hosts."""
        reports = [self.ask(name) for name in names]
        producers = {int(id): status for report in reports for id, status in report["producers"].items()}
        return producers, {status["consumer_id"]: status for report in reports for status in report["consumers"]}

    def view(self) -> dict[str, Any]:
        with contextlib.closing(http.client.HTTPConnection(self.http, timeout=30)) as connection:
            connection.request("GET", "/view")
            return dict(json.loads(connection.getresponse().read()))

    def wait_view(self, is_so: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The view, as soon as it is so."""
        found: list[dict[str, Any]] = []

        def is_found() -> bool:
            if found:
                time.sleep(0.1)  # the view is no newer than that
            found[:] = [self.view()]
            return bool(is_so(found[0]))

        try:
            wait_until(is_found, what)
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(_brief(found[0]), indent=1)}") from None
        return found[0]

    def type(self, *words: str) -> str:
        """What a command prints, run in this process: an interpreter takes a second to start."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        place = ["--aeron-dir", self.aeron_dir, "--config", str(self.driver_file)]
        try:
            result = CliRunner(env={"AERON_DIR": self.aeron_dir}).invoke(group, [*words, *place])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
        return result.output

    def wait_shown(self, *words: str, fits: Callable[[str], object]) -> str:
        """What a command prints, as soon as it fits: it listens for a moment, in which a message may have been late."""
        found: list[str] = []

        def is_shown() -> bool:
            found[:] = [self.type(*words)]
            return bool(fits(found[0]))

        try:
            wait_until(is_shown, f"{' '.join(words)} shows it")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{found[0]}") from None
        return found[0]

    def close(self) -> None:
        self._stack.close()


def _driver_file(folder: Path) -> str:
    return f"""
        [driver]
        instance_id = "lab"
        stream_id_range = "{IDS[0]}-{IDS[-1]}"
        [shm]
        base_dir = "{folder}/shm"
        [policies]
        allow_dynamic_streams = true
        announce_period_ms = {PERIOD_MS}
        lease_keepalive_interval_ms = 500
        lease_expiry_grace_intervals = 8
        [profiles.small]
        header_nslots = 64
        payload_pools = [{{pool_id = 1, stride_bytes = 4096}}]
    """


def _bridge_file(driver_file: Path, source: int, destination: int) -> str:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    channels = [f"aeron:udp?endpoint=127.0.0.1:{port}" for port in ports]
    return f"""
        [bridge]
        instance_id = "bridge"
        driver_config = "{driver_file}"
        payload_channel = "{channels[0]}"
        payload_stream_id = 50000
        control_channel = "{channels[1]}"
        control_stream_id = 1000
        metadata_channel = "{channels[2]}"
        metadata_stream_id = 1300
        [[mappings]]
        source_stream_id = {source}
        dest_stream_id = {destination}
    """


def _brief(view: dict[str, Any]) -> dict[str, Any]:
    """For a failure's words."""
    wanted = ("stream_id", "name", "state", "epoch", "producer_id", "seq", "rate_hz", "consumer_id", "lag", "last_seq",
              "drops_gap", "drops_late", "tag", "is_stale")  # fmt: skip
    brief = {
        key: [{name: row[name] for name in wanted if name in row} for row in view[key]]
        for key in ("streams", "consumers", "services")
    }
    return brief | {"changes": [change["text"] for change in view["changes"][-12:]]}


def by(key: str, rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {row[key]: row for row in rows}


def present(view: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Consumers that hold their lease, by id."""
    return {row["consumer_id"]: row for row in view["consumers"] if row["state"] != "expired"}


def states(view: dict[str, Any], key: str = "streams") -> dict[Any, str]:
    return {row[{"streams": "stream_id", "consumers": "consumer_id"}[key]]: row["state"] for row in view[key]}


@pytest.fixture
def scene() -> Iterator[Scene]:
    with private_directory("tp-scene-") as folder:
        made = Scene(folder)
        try:
            yield made
        finally:
            made.close()


def test_the_view_is_true_at_every_step(scene: Scene) -> None:
    """See the module's own words."""
    it = scene
    driver = it.start("driver", "--config", str(it.driver_file))
    assert "driver" in driver.read_line()
    options = ["--http", "127.0.0.1:0", "--set", "supervisor.instance_id=s1"]
    ready = it.start("supervisor", "--config", str(it.driver_file), *options).read_line()
    address = re.match(r"supervisor s1: ready, http://(\S+)/view", ready)
    assert address is not None, ready
    it.http = address[1]

    # --- everything starts: five streams, twelve consumers, one of which is the bridge
    it.start_host("producers", ["front", "side", "lidar"])
    it.start_host("rear", ["rear"])
    readers = [(stream, 0.0) for stream in ("front", "front", "rear", "rear", "rear", "side", "lidar", "lidar", "far")]
    it.start_bridge()
    it.start_host("readers", consumes=[*readers, ("side", 0.5)])
    it.start_host("frozen", consumes=[("lidar", 0.0)])

    def all_there(view: dict[str, Any]) -> bool:
        tags = {service["tag"] for service in view["services"] if not service["is_stale"]}
        return (
            set(states(view).values()) == {"live"}
            and len(view["streams"]) == 5
            and len(present(view)) == 12
            and tags == {"service:driver:lab", "service:supervisor:s1", *BRIDGE}
        )

    view = it.wait_view(all_there, "five streams live, twelve consumers, four services")
    view = it.wait_view(lambda view: is_known(view, it), "everybody is who they say they are")
    _, consumers = it.truth("readers", "frozen")
    names = {row["stream_id"]: row["name"] for row in view["streams"]}
    assert [names[it.ids[name]] for name in NAMES[:4]] == [f"lab/{name}" for name in NAMES[:4]]
    (bridged,) = set(present(view)) - set(consumers)
    assert present(view)[bridged]["stream_id"] == it.ids["front"]

    # --- one is slow
    (slow,) = [id for id, status in consumers.items() if status["is_slow"]]
    view = it.wait_view(
        lambda view: {id for id, row in present(view).items() if row["state"] != "ok"} == {slow},
        "the slow one, and only it, is in trouble",
    )
    assert states(view, "consumers")[slow] in ("lagging", "dropping")
    row = re.compile(rf"^lab/side +{slow} +\d+ .*(lagging|dropping)", re.M)
    head = re.compile("12 consumers  [▲▼] 1 ")
    page = it.wait_shown("top", "--once", fits=lambda page: row.search(page) and head.search(page))
    assert "5 streams" in page

    # --- one is frozen, loses its lease, and comes back under another id
    (frozen,) = [status["consumer_id"] for status in it.ask("frozen")["consumers"]]
    it.hosts["frozen"].send(signal.SIGSTOP)
    it.wait_view(lambda view: states(view, "consumers").get(frozen) in ("stale", "expired"), "the frozen one is stale")
    view = it.wait_view(lambda view: states(view, "consumers").get(frozen) == "expired", "and loses its lease")
    assert by("stream_id", view["streams"])[it.ids["lidar"]]["consumers"] == 2
    row = re.compile(rf"^lab/lidar +{it.ids['lidar']} +[\d.]+ +[\d.]+ +2 ", re.M)
    page = it.wait_shown("top", "--once", fits=row.search)
    assert str(frozen) not in page
    it.hosts["frozen"].send(signal.SIGCONT)

    def thawed() -> int | None:
        (status,) = it.ask("frozen")["consumers"]
        return status["consumer_id"] if status["is_active"] and status["consumer_id"] != frozen else None

    wait_until(lambda: time.sleep(0.1) or thawed(), "the frozen one has another lease")
    it.wait_view(lambda view: states(view, "consumers").get(thawed()) == "ok", "the view has it under its new id")

    # --- a producer is killed, and another takes its place
    before = by("stream_id", it.view()["streams"])[it.ids["rear"]]
    it.hosts["rear"].send(signal.SIGKILL)
    view = it.wait_view(lambda view: states(view)[it.ids["rear"]] == "no producer", "rear has no producer")
    orphan = by("stream_id", view["streams"])[it.ids["rear"]]
    assert orphan["epoch"] > before["epoch"]
    assert (orphan["producer_id"], orphan["consumers"], orphan["name"]) == (None, 3, "lab/rear")
    readers_of_rear = {id for id, row in present(view).items() if row["stream_id"] == it.ids["rear"]}
    found = json.loads(
        it.wait_shown(
            *("inspect", str(it.ids["rear"]), "--json"),
            fits=lambda text: {row["consumer_id"] for row in json.loads(text)["consumers"]} == readers_of_rear,
        )
    )
    assert (found["epoch"], found["producer_id"], found["status"]["state"]) == (orphan["epoch"], 0, "no producer")
    it.start_host("rear", ["rear"])
    view = it.wait_view(lambda view: states(view)[it.ids["rear"]] == "live", "rear is live again")
    rear, _ = it.truth("rear")
    status = rear[it.ids["rear"]]
    it.wait_view(
        lambda view: is_known(view, it) and is_remapped(view, it.ids["rear"], status["epoch"]),
        "its consumers are in the new producer's epoch",
    )
    row = re.compile(rf"state +live, [\d.]+ Hz; producer {status['producer_id']}")
    it.wait_shown("inspect", "lab/rear", fits=row.search)
    kinds = [change["kind"] for change in it.view()["changes"] if change["stream_id"] == it.ids["rear"]]
    assert [kind for kind in kinds if "producer" in kind][-2:] == ["producer left", "producer attached"]

    # --- the bridge is paused by an event
    assert "paused" in it.type("event", "send", "service:bridge:sender", "pause", "--timeout", "60")
    it.wait_view(
        lambda view: (
            by("tag", view["services"])["service:bridge:sender"]["state"] == "paused"
            and states(view)[it.ids["far"]] == "idle"
        ),
        "the bridge is paused, and far stands still",
    )
    row = re.compile(rf"^\S* *{it.ids['far']} .*idle(.*\n)*service:bridge:sender .*paused", re.M)
    it.wait_shown("top", "--once", fits=row.search)
    it.wait_view(lambda view: states(view)[it.ids["front"]] == "live", "front goes on")
    it.type("event", "send", "service:bridge:sender", "resume", "--timeout", "60")
    it.wait_view(
        lambda view: (
            by("tag", view["services"])["service:bridge:sender"]["state"] == "running"
            and states(view)[it.ids["far"]] == "live"
        ),
        "the bridge runs, and far moves",
    )

    # --- everything comes to rest: every number is equal
    for name in ("producers", "rear", "readers"):
        it.ask(name, "hold")
    it.wait_view(lambda view: is_exact(view, it), "every number in the view is what the processes say")
    check_doctor(it.type("doctor"))
    assert os.path.exists(it.aeron_dir)


def is_known(view: dict[str, Any], it: Scene) -> bool:
    """Who is there: epochs, producers and consumers, as they say themselves."""
    producers, consumers = it.truth("producers", "rear", "readers", "frozen")
    streams, rows = by("stream_id", view["streams"]), present(view)
    for stream_id, status in producers.items():
        row = streams[stream_id]
        if (row["epoch"], row["producer_id"]) != (status["epoch"], status["producer_id"]):
            return False
    for consumer_id, status in consumers.items():
        if consumer_id not in rows or rows[consumer_id]["stream_id"] != status["stream_id"]:
            return False
    return all(
        row["consumers"] == sum(each["stream_id"] == stream_id for each in rows.values())
        for stream_id, row in streams.items()
    )


def is_remapped(view: dict[str, Any], stream_id: int, epoch: int) -> bool:
    rows = [row for row in present(view).values() if row["stream_id"] == stream_id]
    return len(rows) == 3 and {row["epoch"] for row in rows} == {epoch}


def is_exact(view: dict[str, Any], it: Scene) -> bool:
    """At rest nothing moves any more, so there is one truth for all numbers."""
    producers, consumers = it.truth("producers", "rear", "readers", "frozen")
    streams, rows = by("stream_id", view["streams"]), by("consumer_id", view["consumers"])
    for stream_id, status in producers.items():
        row = streams[stream_id]
        if (row["seq"], row["epoch"], row["producer_id"]) != (status["seq"], status["epoch"], status["producer_id"]):
            return False
        if row["state"] != "idle":
            return False
    for consumer_id, status in consumers.items():
        names = ("stream_id", "epoch", "last_seq", "drops_gap", "drops_late", "mode")
        if consumer_id not in rows or any(rows[consumer_id][name] != status[name] for name in names):
            return False
        if rows[consumer_id]["lag"] != 0:
            return False
    return True


def check_doctor(text: str) -> None:
    assert re.search(r"driver", text)
    assert not re.search(r"\bFAIL\b", text), text
