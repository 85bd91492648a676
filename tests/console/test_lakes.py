# SPDX-License-Identifier: Apache-2.0
"""Recordings in the console: started and ended by a page as a real process, and looked at frame by frame."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import tensorpool as tp
from tensorpool.console.lakes import Lakes
from tensorpool.console.server import Console
from tests.console.conftest import Camera, noise
from tests.console.page import Site
from tests.support.processes import wait_until

SHAPE = (12, 16)


class Recorded:
    """A camera, and what a page recorded of it."""

    def __init__(self, camera: Camera, started: dict[str, Any], ended: dict[str, Any]) -> None:
        self.camera = camera
        self.started = started
        self.ended = ended


@pytest.fixture(scope="module")
def recorded(console: Console, client: tp.Client, lake: Path) -> Iterator[Recorded]:
    """Two runs of a camera, recorded by one recording that a page started and ended."""
    site, name = Site.of(console), "console/recorded"
    first = Camera(client, name, noise(SHAPE), 100.0)
    path = "/api/lakes/lab/recording"
    started: list[Any] = []

    def is_started() -> bool:
        """Its name comes a moment after it."""
        started.append(site.post(path, {"streams": [name]}))
        return bool(started[-1].status == 201)

    wait_until(is_started, "it is recorded")
    wait_until(lambda: frames_of(site) > 50, "frames are in the lake")
    first.close()
    second = Camera(client, name, noise(SHAPE), 100.0)
    count = frames_of(site)
    wait_until(lambda: frames_of(site) > count + 50, "frames of the next epoch are in the lake")
    ended = site.delete(path)
    assert ended.status == 200, ended.body
    yield Recorded(second, started[-1].json, ended.json)
    second.close()


def about(site: Site) -> dict[str, Any]:
    (found,) = site.get("/api/lakes").json
    assert isinstance(found, dict)
    return found


def frames_of(site: Site) -> int:
    return sum(stream["frames"] for stream in about(site)["streams"])


def test_a_recording_runs_as_a_process_and_accounts_for_its_frames(site: Site, recorded: Recorded, lake: Path) -> None:
    """It is started with the stream's name, ends in order, and the lake has what it says."""
    assert recorded.started["is_running"]
    assert recorded.ended["exit_code"] == 0
    assert recorded.ended["text"].startswith("lake ")
    with pytest.raises(ProcessLookupError):
        os.kill(recorded.started["pid"], 0)
    found = about(site)
    assert (found["name"], found["path"], found["error"]) == ("lab", str(lake), None)
    (stream,) = found["streams"]
    real = tp.open(lake)["console/recorded"]
    assert (stream["stream"], stream["stream_id"]) == ("console/recorded", recorded.camera.stream_id)
    assert (stream["frames"], stream["epochs"]) == (len(real), len(real.epochs)) == (len(real), 2)
    assert stream["bytes"] > 0
    assert 0 < stream["from"] < stream["to"]
    lost = sum(gap.hi - gap.lo for gap in real.gaps())
    assert sum(stream["lost"].values()) == lost


def test_recorded_frames_are_the_published_ones(site: Site, recorded: Recorded, lake: Path) -> None:
    """By seq, by moment, one after the other across epochs; as picture and as array."""
    real = tp.open(lake)["console/recorded"]
    epoch, later = real.epochs
    seqs = real.epoch(epoch).seqs.tolist()
    paint = recorded.camera.paint

    def frame(**query: object) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        asked = "&".join(f"{key}={value}" for key, value in query.items())
        answer = site.get(f'/api/lakes/lab/frame?stream=console/recorded&{asked}&look={{"lossless":true}}')
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "image/png"
        return json.loads(answer.headers["x-frame"]), np.asarray(PIL.Image.open(io.BytesIO(answer.body)))

    for seq in (seqs[0], seqs[len(seqs) // 2], seqs[-1]):
        header, pixels = frame(epoch=epoch, seq=seq)
        assert (header["epoch"], header["seq"], header["shape"]) == (epoch, seq, list(SHAPE))
        assert np.array_equal(pixels, paint(seq))
        assert frame(at=header["time"])[0]["seq"] == seq
        assert frame(at=header["time"] - 1000)[0]["seq"] <= max(seq - 1, seqs[0]) if seq != seqs[0] else True
        npy = site.get(f"/api/lakes/lab/frame.npy?stream=console/recorded&epoch={epoch}&seq={seq}")
        assert np.array_equal(np.load(io.BytesIO(npy.body)), paint(seq))
    assert frame(epoch=epoch, seq=seqs[0], step=1)[0]["seq"] == seqs[1]
    assert frame(epoch=epoch, seq=seqs[1], step=-1)[0]["seq"] == seqs[0]
    assert frame(epoch=epoch, seq=seqs[0], step=-1)[0]["seq"] == seqs[0]
    header, pixels = frame(epoch=epoch, seq=seqs[-1], step=1)
    assert (header["epoch"], header["seq"]) == (later, int(real.epoch(later).seqs[0]))
    assert frame(epoch=later, seq=header["seq"], step=-1)[0]["seq"] == seqs[-1]
    newest, _ = frame()
    assert (newest["epoch"], newest["seq"]) == (later, int(real.epoch(later).seqs[-1]))


def test_a_timeline_adds_up(site: Site, recorded: Recorded) -> None:
    """The frames of all buckets are those of the lake, in two epochs; a span of it has fewer."""
    found = site.get("/api/lakes/lab/timeline?stream=console/recorded").json
    (stream,) = about(site)["streams"]
    assert sum(frames for _, frames, _ in found["buckets"]) == stream["frames"]
    assert sum(lost for _, _, lost in found["buckets"]) == sum(stream["lost"].values())
    assert (found["from"], found["to"]) == (stream["from"], stream["to"])
    assert [epoch["frames"] > 0 for epoch in found["epochs"]] == [True, True]
    middle = (found["from"] + found["to"]) // 2
    part = site.get(f"/api/lakes/lab/timeline?stream={stream['stream_id']}&to={middle}").json
    assert 0 < sum(frames for _, frames, _ in part["buckets"]) < stream["frames"]


def test_what_is_not_recorded_is_said(site: Site, recorded: Recorded) -> None:
    """Streams, seqs, lakes, and numbers that are none."""
    expected = {
        "/api/lakes/lab/timeline?stream=nobody": (404, "nobody"),
        "/api/lakes/lab/frame?stream=console/recorded&epoch=1&seq=0": (404, "epoch 1"),
        "/api/lakes/lab/frame?stream=console/recorded&at=0": (404, "1970"),
        "/api/lakes/lab/frame?stream=console/recorded&seq=99999999": (404, "99999999"),
        "/api/lakes/lab/frame?stream=console/recorded&seq=x": (400, "seq"),
        "/api/lakes/lab/frame?stream=console/recorded&seq=1e9": (400, "seq"),
        "/api/lakes/lab/frame?stream=console/recorded&look={": (400, "look"),
        '/api/lakes/lab/frame?stream=console/recorded&look={"width":0}': (400, "look.width"),
        '/api/lakes/lab/frame?stream=console/recorded&look={"index":[4]}': (422, "look.index"),
        "/api/lakes/other/timeline?stream=x": (404, "--lake"),
        "/api/lakes/..%2f..%2fetc/timeline?stream=x": (404, ""),
    }
    for path, (status, word) in expected.items():
        answer = site.get(path)
        assert answer.status == status, (path, answer.body)
        assert word in answer.json["error"], path


def test_a_recording_that_cannot_be_started_is_refused(site: Site, recorded: Recorded) -> None:
    """Streams that are not there, also those that look like options, and none at all."""
    path = "/api/lakes/lab/recording"
    assert site.post(path, {"streams": []}).status == 400
    for stream in ("nobody", "--frames=1", "-h", 4_000_000_000):
        answer = site.post(path, {"streams": [stream]})
        assert (answer.status, str(stream) in answer.json["error"]) == (404, True)
    assert site.post("/api/lakes/other/recording", {"streams": ["console/recorded"]}).status == 404
    first = site.post(path, {"streams": [recorded.camera.stream_id]})
    assert first.status == 201
    second = site.post(path, {"streams": [recorded.camera.stream_id]})
    assert (second.status, "is running" in second.json["error"]) == (409, True)
    assert site.delete(path).json["is_running"] is False


def test_lakes_with_the_same_name_get_numbers(tmp_path: Path) -> None:
    """A folder with something else in it is an error of that lake alone."""
    (tmp_path / "a" / "lab").mkdir(parents=True)
    (tmp_path / "a" / "lab" / "notes.txt").write_text("x")
    found = Lakes([str(tmp_path / "a" / "lab"), str(tmp_path / "b" / "lab")]).about()
    assert [lake["name"] for lake in found] == ["lab", "lab-2"]
    assert "_delta_log" in found[0]["error"]
    assert found[1]["error"] is None
