# SPDX-License-Identifier: Apache-2.0
"""`consumer.widget()` in a kernel of its own: the test is the browser, over Jupyter's protocol."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from PIL import Image

import tensorpool as tp
from tests.support.processes import wait_until

CELL = """
import tensorpool as tp
client = tp.connect()
consumer = client.consumer("widget/front")
widget = consumer.widget()
widget.model_id
"""


class Notebook:
    """A kernel, and the browser's end of one widget."""

    def __init__(self, kernel: BlockingKernelClient) -> None:
        self.kernel = kernel
        self.comm = ""
        self.pictures: list[tuple[dict[str, Any], bytes]] = []
        self.texts: list[str] = []

    def run(self, code: str) -> str:
        """Execute a cell; the text of its result."""
        shown = ""

        def on_output(message: dict[str, Any]) -> None:
            nonlocal shown
            content = message["content"]
            assert message["msg_type"] != "error", content
            shown = content.get("data", {}).get("text/plain", shown)

        self.kernel.execute_interactive(code, timeout=90, output_hook=on_output)
        return shown

    def send(self, **content: Any) -> None:
        data = {"comm_id": self.comm, "data": {"method": "custom", "content": content}}
        self.kernel.shell_channel.send(self.kernel.session.msg("comm_msg", data))

    def set(self, **state: Any) -> None:
        data = {"comm_id": self.comm, "data": {"method": "update", "state": state, "buffer_paths": []}}
        self.kernel.shell_channel.send(self.kernel.session.msg("comm_msg", data))

    def listen(self, seconds: float = 0.0) -> None:
        """Take what the kernel has sent, and what it sends within that time."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while True:
                message = self.kernel.get_iopub_msg(timeout=max(0.02, deadline - time.monotonic()))
                data = message["content"].get("data", {})
                if message["msg_type"] == "comm_msg" and data.get("method") == "custom":
                    if message["buffers"]:
                        self.pictures.append((data["content"], bytes(message["buffers"][0])))
                    else:
                        self.texts.append(data["content"]["text"])

    def picture(self, number: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """The picture with that number, when it has come."""
        wait_until(lambda: self.listen() or len(self.pictures) > number, "no picture came")
        about, data = self.pictures[number]
        return about, np.asarray(Image.open(io.BytesIO(data)))


@pytest.fixture(scope="module")
def notebook(pool: tp.Local, jupyter: Path) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    period_ms = str(pool.config.policies.announce_period_ms)
    environment = {"AERON_DIR": pool.aeron_dir, "SHM_BASE_DIR": pool.config.shm.base_dir}
    environment["POLICIES_ANNOUNCE_PERIOD_MS"] = period_ms
    manager.start_kernel(env=os.environ | environment, cwd=str(jupyter))
    kernel = manager.client()
    kernel.start_channels()
    try:
        kernel.wait_for_ready(timeout=90)
        yield Notebook(kernel)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


def test_pictures_come_only_when_a_view_asks(notebook: Notebook, client: tp.Client) -> None:
    """One for each request; the newest frame; the consumer is attached while views ask, and not longer."""
    with client.producer("widget/front", create=True) as producer:
        notebook.comm = notebook.run(CELL).strip("'")
        wait_until(lambda: producer.consumers == 1, "the user's own consumer is there")
        for shade in (10, 20, 200):
            producer.publish(np.full((48, 64), shade, np.uint8))
        notebook.listen(0.3)
        assert not notebook.pictures  # no view is shown
        assert notebook.run("widget._consumer is None") == "True"
        notebook.send(view="one", width=640)
        about, pixels = notebook.picture(0)
        assert (about["view"], about["seq"], about["about"], about["media"]) == ("one", 2, "48x64 uint8", "image/jpeg")
        assert pixels.shape == (48, 64)
        assert np.abs(pixels.astype(int) - 200).max() <= 2
        wait_until(lambda: producer.consumers == 2, "the widget has a consumer of its own")
        for shade in range(5):
            producer.publish(np.full((48, 64), shade, np.uint8))
        notebook.listen(0.3)
        assert len(notebook.pictures) == 1  # one in flight: the next only when it is asked for
        notebook.send(view="one", width=640)
        assert notebook.picture(1)[0]["seq"] == 7
        notebook.send(view="one", width=640)  # no newer frame: an answer that says so
        wait_until(lambda: notebook.listen() or notebook.texts, "no answer came")
        assert notebook.texts == ["no new frame"]
        wait_until(lambda: notebook.run("widget._consumer is None") == "True", "it goes when no view asks any more")
        wait_until(lambda: producer.consumers == 1, "the user's own consumer stays")
        assert notebook.run("consumer.stats.received, consumer.stats.drops") == "(0, {})"  # its own misses nothing


def test_the_colour_map_can_be_chosen_from_both_sides(notebook: Notebook, client: tp.Client) -> None:
    """In the browser or by the trait; a frame that is shown already is drawn again in other colours."""
    with client.producer("widget/front", create=True) as producer:
        producer.publish(np.full((16, 16), 255, np.uint8))
        notebook.comm = notebook.run(CELL).strip("'")
        notebook.pictures.clear()
        notebook.send(view="a", width=100)
        assert notebook.picture(0)[1].shape == (16, 16)
        notebook.set(colormap="viridis")
        notebook.send(view="a", width=100)
        about, pixels = notebook.picture(1)
        assert about["seq"] == 0
        assert np.abs(pixels[8, 8].astype(int) - [253, 231, 37]).max() <= 6
        assert notebook.run("widget.colormap") == "'viridis'"
        notebook.run("widget.colormap = 'gray'")
        notebook.send(view="a", width=100)
        assert notebook.picture(2)[1].shape == (16, 16)


def test_bad_requests_and_frames_without_a_picture_end_nothing(notebook: Notebook, client: tp.Client) -> None:
    """Requests that make no sense are ignored; a stream that has no frame, or no driver, is a sentence."""
    with client.producer("widget/front", create=True) as producer:
        notebook.comm = notebook.run(CELL).strip("'")
        notebook.texts.clear()
        notebook.pictures.clear()
        for nonsense in ({}, {"view": 5}, {"view": "x", "width": "wide"}, {"view": "x", "width": [1]}):
            notebook.send(**nonsense)
        notebook.send(view="b", width=-5)
        wait_until(lambda: notebook.listen() or notebook.texts, "no answer came")
        assert notebook.texts == ["waiting for the first frame"]
        notebook.send(view="b", width=10**9)
        producer.publish(np.sin(np.arange(1000)))
        about, pixels = notebook.picture(0)
        assert (about["media"], about["about"], pixels.shape) == ("image/png", "1000 float64", (240, 640))
        notebook.run("client.close()")
        notebook.texts.clear()
        wait_until(
            lambda: notebook.send(view="c", width=100) or notebook.listen(1.2) or notebook.texts, "no answer came"
        )
        notebook.run("widget.close()")


def test_a_widget_needs_a_client_with_a_thread(pool: tp.Local) -> None:
    """A client that is turned by hand is refused in one sentence."""
    with (
        pool.connect(conductor="invoked") as client,
        client.producer("widget/invoked", create=True),
        client.consumer("widget/invoked") as consumer,
        pytest.raises(tp.LocalProtocolError, match="a widget needs a client with a thread"),
    ):
        consumer.widget()


def test_without_anywidget_it_says_what_to_install(client: tp.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the extra, in one sentence."""
    monkeypatch.delitem(sys.modules, "tensorpool.client.stream_widget", raising=False)
    monkeypatch.setattr("tensorpool.extras.find_spec", lambda name: None if name == "anywidget" else name)
    with (
        client.producer("widget/bare", create=True),
        client.consumer("widget/bare") as consumer,
        pytest.raises(tp.MissingExtra, match=r"consumer.widget\(\) needs anywidget, .*aeron-tensorpool\[notebook\]"),
    ):
        consumer.widget()
