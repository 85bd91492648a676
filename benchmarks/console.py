# SPDX-License-Identifier: Apache-2.0
"""What live previews cost: a 4K camera at 60 Hz, watched by four pages, next to the same camera unwatched.

    python -m benchmarks.console [--rounds 8] [--seconds 5] [--sockets 4] [--shape 2160x3840x3] [--rate 60] [--json]

Camera, console and pages are processes of their own; watched and unwatched spans alternate. Reports the console's share
of a core, pictures a second, and the camera's publish time, each as the median of the rounds with an interval of 95 %
(bootstrap over rounds). Exit code 1: the console takes more than 15 % of a core, or the publish time of watched rounds
is longer than that of unwatched ones beyond the interval, or a page lost the connection.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from websockets.sync.client import connect

import tensorpool as tp
from benchmarks.live_camera import ATTACH_S, PICTURES, STREAM_ID, Site, wait_for
from tensorpool.cli.options import shape as parse_shape
from tensorpool.cli.test_pattern import Scene
from tensorpool.console.messages import unpack

NSLOTS: Final = 16
MOST_OF_A_CORE: Final = 0.15
RESAMPLES: Final = 4000


def film(settings: dict[str, Any], shape: tuple[int, ...], rate_hz: float, pipe: Connection) -> None:
    """Publish at a rate; on request, the nanoseconds that each publish took since the last request."""
    scene, pictures = Scene(), [np.empty(shape, np.uint8) for _ in range(PICTURES)]
    for seq, picture in enumerate(pictures):
        scene.paint(picture, seq)
    with (
        tp.connect(settings["aeron_dir"], overrides=settings["overrides"]) as client,
        client.producer(STREAM_ID, create=True, timeout=ATTACH_S) as producer,
    ):
        pipe.send("ready")
        began_s, count, taken = time.monotonic(), 0, list[int]()
        while True:
            count += 1
            time.sleep(max(0.0, began_s + count / rate_hz - time.monotonic()))
            began_ns = time.perf_counter_ns()
            producer.publish(pictures[count % PICTURES])
            taken.append(time.perf_counter_ns() - began_ns)
            if pipe.poll():
                if pipe.recv() == "stop":
                    return
                pipe.send((taken, producer.stats.published))
                taken = []


def watch(address: str, token: str, sockets: int, pipe: Connection) -> None:
    """So many pages, as far as the console can tell: each acknowledges its pictures; on request, how many there were.

    The process ends with the pipe. A page that loses its connection counts no further.
    """
    counts = [0] * sockets

    def look(number: int) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        with connect(f"ws://{address}/ws/preview/{STREAM_ID}", additional_headers=headers, max_size=None) as socket:
            socket.send(json.dumps({"type": "look", "look": {}}))
            for message in socket:
                if isinstance(message, bytes):
                    counts[number] += 1
                    socket.send(json.dumps({"type": "ack", "number": unpack(message)[0]["number"]}))

    for number in range(sockets):
        threading.Thread(target=look, args=(number,), daemon=True).start()
    with suppress(EOFError):
        while pipe.recv() == "count":
            pipe.send(list(counts))
    os._exit(0)


class Console:
    """`tensorpool console` in a process of its own."""

    def __init__(self, site: Site) -> None:
        settings = site.settings
        command = [sys.executable, "-m", "tensorpool", "console", "--json", "--aeron-dir", settings["aeron_dir"]]
        for key, value in settings["overrides"].items():
            command += ["--set", f"{key}={value}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self.address: str = ready["address"].removeprefix("http://").strip("/")
        self.token: str = ready["url"].partition("token=")[2]

    def cpu_s(self) -> float:
        """Of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def child(target: Any, *arguments: Any) -> Any:
    """A process with a pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(2)
        process.kill()


def ask(pipe: Connection, question: str) -> Any:
    pipe.send(question)
    return pipe.recv()


def span(camera: Connection, console: Console, seconds: float) -> dict[str, Any]:
    """Publish times and the console's share of a core, over some seconds."""
    ask(camera, "times")
    before_s, began_s = console.cpu_s(), time.monotonic()
    time.sleep(seconds)
    taken, published = ask(camera, "times")
    core = (console.cpu_s() - before_s) / (time.monotonic() - began_s)
    return {"core": core, "publish_us": statistics.median(taken) / 1e3, "frames": len(taken), "published": published}


def interval(values: list[float], seed: int = 1) -> list[float]:
    """Of the median, 95 %, by resampling the rounds."""
    chance = np.random.default_rng(seed)
    medians = np.median(chance.choice(values, (RESAMPLES, len(values))), axis=1)
    return [float(np.quantile(medians, share)) for share in (0.025, 0.975)]


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "interval": interval(values), "rounds": values}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = parse_shape(arguments.shape)
    watched: list[dict[str, Any]] = []
    unwatched: list[dict[str, Any]] = []
    pictures: list[float] = []
    with (
        Site(shape, NSLOTS) as site,
        child(film, site.settings, shape, arguments.rate) as camera,
    ):
        camera.recv()
        console = Console(site)
        try:
            for _ in range(arguments.rounds):
                unwatched.append(span(camera, console, arguments.seconds))
                with child(watch, console.address, console.token, arguments.sockets) as pages:
                    wait_for(lambda pages=pages: min(ask(pages, "count")) > 3, 60)  # type: ignore[misc]
                    before, began_s = ask(pages, "count"), time.monotonic()
                    watched.append(span(camera, console, arguments.seconds))
                    after, seconds = ask(pages, "count"), time.monotonic() - began_s
                    pictures.append(min(np.subtract(after, before).tolist()) / seconds)
        finally:
            console.close()
        camera.send("stop")
    ratio = [b["publish_us"] / a["publish_us"] for a, b in zip(unwatched, watched, strict=True)]
    return {
        "shape": arguments.shape,
        "rate_hz": arguments.rate,
        "sockets": arguments.sockets,
        "core_unwatched": summary([one["core"] for one in unwatched]),
        "core_watched": summary([one["core"] for one in watched]),
        "pictures_per_s": summary(pictures),
        "publish_us_unwatched": summary([one["publish_us"] for one in unwatched]),
        "publish_us_watched": summary([one["publish_us"] for one in watched]),
        "publish_ratio": summary(ratio),
        "camera_hz": summary([one["frames"] / arguments.seconds for one in watched]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--sockets", type=int, default=4)
    parser.add_argument("--shape", default="2160x3840x3")
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    is_good = found["core_watched"]["median"] <= MOST_OF_A_CORE and found["publish_ratio"]["interval"][0] <= 1.0
    if arguments.json:
        print(json.dumps(found | {"is_good": is_good}))
        return 0 if is_good else 1
    for name, scale, unit in (
        ("core_unwatched", 100, "% of a core"),
        ("core_watched", 100, "% of a core"),
        ("pictures_per_s", 1, "a second, of the slowest page"),
        ("publish_us_unwatched", 1, "µs"),
        ("publish_us_watched", 1, "µs"),
        ("publish_ratio", 1, "watched / unwatched"),
        ("camera_hz", 1, "Hz"),
    ):
        one = found[name]
        low, high = (scale * end for end in one["interval"])
        print(f"{name:<22} {scale * one['median']:9.2f}  [{low:.2f}, {high:.2f}]  {unit}")
    print("as it should be" if is_good else "a target is missed")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
