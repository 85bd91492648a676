# SPDX-License-Identifier: Apache-2.0
"""examples/notebook/first_look.ipynb, from the first cell to the last."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.support.processes import ROOT

PATH = ROOT / "examples/notebook/first_look.ipynb"
read: Callable[..., Any] = nbformat.read
VIEW = "application/vnd.jupyter.widget-view+json"


def results(notebook: Any) -> dict[str, dict[str, Any]]:
    """What each cell showed, by its last line."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [output.data for output in cell.outputs if output.output_type == "execute_result"]
            assert len(shown) == len(cell.outputs) <= 1, cell.outputs  # and nothing on stderr
            found[cell.source.splitlines()[-1]] = shown[0] if shown else {}
    return found


@pytest.fixture(scope="module")
def shown(jupyter: Path) -> dict[str, dict[str, Any]]:
    notebook = read(PATH, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": jupyter}})
    return results(client.execute())


def test_every_cell_runs_and_shows_what_it_says(shown: dict[str, dict[str, Any]]) -> None:
    """Objects in a line; frames as a table with a picture; the widget as a view; nothing else."""
    assert shown["client"]["text/plain"].endswith("0 producers, 0 consumers>")
    assert shown["producer"]["text/plain"].startswith('<Producer of stream "camera/front" (')
    assert ": active, epoch " in shown["producer"]["text/plain"]
    assert VIEW in shown["consumer.widget()"]
    assert "1 received" in shown["consumer"]["text/plain"]
    assert shown["pool"]["text/plain"].endswith(": closed>")


def test_frames_show_their_pixels(shown: dict[str, dict[str, Any]]) -> None:
    """In colour, as the slice of a volume, as a curve."""
    frame = shown["frame"]
    assert all(part in frame["text/html"] for part in ("camera/front", ">480x640x3<", ">uint8<", "<img"))
    colour = np.asarray(Image.open(io.BytesIO(base64.b64decode(frame["image/png"]))))
    assert colour.shape == (240, 320, 3)  # half as large: 480 pixels at most
    assert abs(int(colour[0, 0, 1])) <= 1  # green grows from the first row to the last
    assert abs(int(colour[-1, 0, 1]) - 239) <= 1
    assert (np.abs(colour[..., 0].astype(int) + colour[..., 2] - 255) <= 2).all()
    assert ">slice 8 of 16<" in shown['client.consumer("camera/depth").latest()']["text/html"]
    curve = shown['client.consumer("microphone").latest()']
    assert ">4800<" in curve["text/html"]
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(curve["image/png"])))).any()


def test_the_notebook_is_kept_without_results() -> None:
    """So that its history shows what was changed."""
    notebook = read(PATH, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
