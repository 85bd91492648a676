# SPDX-License-Identifier: Apache-2.0
"""What notebooks and the interpreter show of frames and of the objects around them."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tensorpool as tp
from tensorpool.lake import Lake
from tests.support.frame_rows import make_lake, row
from tests.support.processes import ROOT


def picture(png: bytes | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    assert png is not None
    return np.asarray(Image.open(io.BytesIO(png)))


def published(client: tp.Client, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> tp.Frame:
    """The array as a frame; its stream is closed, which frames outlive."""
    with client.producer(name, create=True) as producer, client.consumer(name) as consumer:
        producer.wait_for_consumers()
        producer.publish(array)
        frame = consumer.poll(timeout=60)
        assert frame is not None
        return frame


def test_a_frame_is_a_table_and_a_picture(client: tp.Client) -> None:
    """Its stream by name, seq, time, shape and dtype; the picture has the pixels of the frame."""
    array = np.arange(300 * 260 * 3, dtype=np.uint32).astype(np.uint8).reshape(300, 260, 3)
    frame = published(client, "notebook/colour", array)
    assert (picture(frame._repr_png_()) == array).all()
    html = frame._repr_html_()
    cells = dict(re.findall(r"<th[^>]*>(.*?)</th><td[^>]*>(.*?)</td>", html))
    assert cells.pop("stream") == f"&quot;notebook/colour&quot; ({frame.stream_id})"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+00:00", cells.pop("time"))
    assert cells == {"seq": f"0 of epoch {frame.epoch}", "shape": "300x260x3", "dtype": "uint8"}
    embedded = re.search(r"data:image/png;base64,([\w+/=]+)", html)
    assert embedded is not None
    assert base64.b64decode(embedded[1]) == frame._repr_png_()
    assert not re.search(r"https?:|<script", html)


def test_small_frames_are_enlarged_and_others_explained(client: tp.Client) -> None:
    """Four by four becomes 240 pixels; floats name their range, stacks their slice; a line is drawn."""
    frame = published(client, "notebook/small", np.eye(4, dtype=np.float16))
    small = picture(frame._repr_png_())
    assert small.shape == (240, 240)
    assert (small[::60, ::60] == 255 * np.eye(4)).all()
    assert ">0 to 1<" in frame._repr_html_()
    assert ">float16<" in frame._repr_html_()
    stack = published(client, "notebook/stack", np.zeros((5, 6, 40, 50), np.int16))
    assert ">slice 2, 3 of 5x6<" in stack._repr_html_()
    line = picture(published(client, "notebook/line", np.sin(np.arange(500)))._repr_png_())
    assert line.shape == (160, 480)
    assert 0.05 < (line > 0).mean() < 0.95


def test_the_order_of_channels_is_the_one_that_the_stream_states(client: tp.Client) -> None:
    """OpenCV's cameras have blue first: their pictures do not come out blue."""
    with client.producer("notebook/bgr", create=True) as producer, client.consumer("notebook/bgr") as consumer:
        producer.set_metadata({"pixel_format": "bgr24"})
        producer.wait_for_consumers()
        producer.publish(np.full((240, 240, 3), (0, 0, 255), np.uint8))
        frame = consumer.poll(timeout=60)
        assert frame is not None
        assert picture(frame._repr_png_())[0, 0].tolist() == [255, 0, 0]


def test_an_overwritten_frame_says_so(client: tp.Client) -> None:
    """A picture of another frame would be a lie."""
    with client.producer("notebook/over", create=True) as producer, client.consumer("notebook/over") as consumer:
        producer.wait_for_consumers()
        producer.publish(np.zeros((8, 8), np.uint8))
        frame = consumer.poll(timeout=60)
        assert frame is not None
        for shade in range(16):
            producer.publish(np.full((8, 8), shade, np.uint8))
        assert frame._repr_png_() is None
        html = frame._repr_html_()
        assert "it was overwritten; show consumer.latest()" in html
        assert "<img" not in html
        assert ">8x8<" in html


def test_names_from_elsewhere_are_text(client: tp.Client) -> None:
    """Markup in a stream's name is shown, not obeyed."""
    frame = published(client, "<img src=x onerror=alert(1)>", np.zeros((2, 2), np.uint8))
    assert "<img src=x" not in frame._repr_html_()
    assert "&lt;img src=x onerror=alert(1)&gt;" in frame._repr_html_()


def test_without_pillow_the_table_says_what_to_install(client: tp.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame is described nevertheless."""
    frame = published(client, "notebook/bare", np.zeros((2, 2), np.uint8))
    monkeypatch.setattr("tensorpool.extras.find_spec", lambda name: None)
    assert frame._repr_png_() is None
    assert "pip install &quot;aeron-tensorpool[notebook]&quot;" in frame._repr_html_()


def test_recorded_frames_look_like_live_ones(tmp_path: Path) -> None:
    """The same table and picture."""
    array = np.arange(60_000, dtype=np.uint32).astype(np.uint8).reshape(250, 240)
    make_lake(tmp_path / "lake", [row(array, seq=3)])
    (stream,) = tp.open(tmp_path / "lake").values()
    frame = stream[3]
    assert (picture(frame._repr_png_()) == array).all()
    assert ">250x240<" in frame._repr_html_()


def test_objects_say_what_they_are(pool: tp.Local, client: tp.Client, tmp_path: Path) -> None:
    """In one line: which stream, in which state, how far."""
    assert repr(pool) == f"<Local driver-01 at {pool.aeron_dir}: running>"
    with pool.connect() as own:
        assert repr(own) == f"<Client at {pool.aeron_dir}: 0 producers, 0 consumers>"
        producer = own.producer("notebook/said", create=True)
        consumer = own.consumer("notebook/said")
        assert repr(own) == f"<Client at {pool.aeron_dir}: 1 producer, 1 consumer>"
        producer.wait_for_consumers()
        stream = f'stream "notebook/said" ({producer.stream_id})'
        about = f"{stream}: active, epoch {producer.epoch}"
        assert repr(producer) == f"<Producer of {about}, next seq 0, 1 reading>"
        slot = producer.claim((4, 5), np.uint16)
        assert repr(slot) == f"<Slot 0 of {stream}: uint16 4x5, being filled>"
        slot.commit()
        assert repr(slot) == f"<Slot 0 of {stream}: uint16 4x5, published>"
        given_up = producer.claim((4,), np.uint8)
        given_up.abandon()
        assert repr(given_up) == f"<Slot - of {stream}: uint8 4, given up or dropped>"
        producer.publish(np.zeros(3))
        assert consumer.latest() is not None
        assert repr(consumer) == f"<Consumer of {about}, 1 received, 1 skipped>"
        consumer.close()
        producer.close()
        assert repr(consumer).startswith(f"<Consumer of {stream}: closed")
        assert repr(producer).startswith(f"<Producer of {stream}: closed")
    assert repr(own) == f"<Client at {pool.aeron_dir}: closed>"
    path = tmp_path / "lake"
    make_lake(path, [row(np.zeros(3), seq=0), row(np.zeros(3), seq=1)])
    lake = Lake.open(path)
    assert repr(lake) == f"<Lake {path}>"
    lake.files()
    assert repr(lake) == f"<Lake {path}, version 1: 2 frames of 1 stream>"


def test_frames_cost_no_import_of_pictures() -> None:
    """Receiving loads neither Pillow nor anywidget nor the looks."""
    script = (
        "import sys, tensorpool.client.consumer, tensorpool.client.frame\n"
        "print([name for name in ('PIL', 'anywidget', 'tensorpool.looks', 'traitlets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.stdout.strip() == "[]"
