# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a frame: its pixels, parts, slices and values are those that a producer published."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tensorpool.cli.test_pattern import Checked, Scene
from tests.console_page.site import Site, Watched, running
from tests.support.processes import wait_until

SHAPE: Final = (120, 160, 3)
VOLUME: Final = (6, 40, 50)
JPEG_QUALITY: Final = 80
READ: Final = """() => {
    const canvas = document.querySelector('.viewport canvas');
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const { seq, media, region } = canvas.dataset;
    return { seq: Number(seq), media, region, width: canvas.width, height: canvas.height, data: Array.from(data) };
}"""
SHOWN: Final = "Number(document.querySelector('.viewport canvas')?.dataset.seq)"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A colour camera, a volume and a spectrum."""
    with running() as site:
        site.start_camera("camera", "--pattern", "scene", "--shape", "120x160x3", "--rate", "20")
        site.start_camera("volume", "--pattern", "checked", "--shape", "6x40x50", "--dtype", "uint16", "--rate", "10")
        site.start_camera("spectrum", "--pattern", "gradient", "--shape", "1000", "--dtype", "float32", "--rate", "10")
        for name in ("camera", "volume", "spectrum"):
            site.stream(name)
        yield site


def watch(seen: Watched, site: Site, name: str) -> None:
    """Open the view of a stream."""
    seen.open(site.url(f"/streams/{site.stream(name)['stream_id']}"))


def picture(seen: Watched, media: str, condition: str = "true") -> tuple[int, npt.NDArray[np.uint8], list[int]]:
    """What the canvas has now: seq, pixels, and the part of the array."""
    seen.wait(f"document.querySelector('.viewport canvas')?.dataset.media === '{media}' && {condition}")
    found = seen.page.evaluate(READ)
    pixels = np.array(found["data"], np.uint8).reshape(found["height"], found["width"], 4)
    assert (pixels[..., 3] == 255).all()
    return found["seq"], pixels[..., :3], [int(text) for text in found["region"].split(",") if text]


def scene(seq: int) -> npt.NDArray[np.uint8]:
    array = np.empty(SHAPE, np.uint8)
    Scene().paint(array, seq)
    return array


def pause(seen: Watched) -> int:
    """The seq of the frame that stays."""
    seen.wait(f"{SHOWN} >= 0")
    seen.page.get_by_role("button", name="Pause").click()
    seen.wait("document.querySelector('.paused') !== null")
    seen.page.wait_for_timeout(500)  # a picture that was under way when it was paused
    return int(seen.page.evaluate(SHOWN))


def test_a_lossless_picture_has_every_pixel_of_the_published_frame(seen: Watched, site: Site) -> None:
    """Whole frames, several of them, byte for byte."""
    watch(seen, site, "camera")
    seen.page.get_by_label("lossless").check()
    before = -1
    for _ in range(3):
        seq, pixels, _ = picture(seen, "image/png", f"{SHOWN} > {before}")
        assert np.array_equal(pixels, scene(seq))
        before = seq


def test_a_usual_picture_differs_by_less_than_jpeg_does(seen: Watched, site: Site) -> None:
    """Compared with the published frame, and with what a JPEG of it loses."""
    watch(seen, site, "camera")
    seq, pixels, _ = picture(seen, "image/jpeg")
    published = scene(seq)
    encoded = io.BytesIO()
    Image.fromarray(published).save(encoded, "JPEG", quality=JPEG_QUALITY)
    allowed = np.abs(np.asarray(Image.open(encoded), np.int16) - published).mean()
    error = np.abs(pixels.astype(np.int16) - published).mean()
    assert 0 < error <= 1.1 * allowed, (error, allowed)


def test_zooming_shows_the_pixels_of_that_part(seen: Watched, site: Site) -> None:
    """By keys: the part is smaller than the frame and equals it there; `0` shows the whole frame again."""
    watch(seen, site, "camera")
    seen.page.get_by_label("lossless").check()
    picture(seen, "image/png")
    for _ in range(5):
        seen.page.keyboard.press("+")
    is_part = "document.querySelector('.viewport canvas').width < 80"
    seq, pixels, (x, y, width, height) = picture(seen, "image/png", is_part)
    assert 0 < x < x + width < SHAPE[1]
    assert np.array_equal(pixels, scene(seq)[y : y + height, x : x + width])
    assert_drawn_where_it_points(seen, scene(pause(seen)))
    seen.page.keyboard.press("0")
    seq, pixels, _ = picture(seen, "image/png", f"document.querySelector('.viewport canvas').width === {SHAPE[1]}")
    assert np.array_equal(pixels, scene(seq))


def assert_drawn_where_it_points(seen: Watched, array: npt.NDArray[np.uint8]) -> None:
    """The pixel that is drawn under the pointer is that of the coordinates which the page says."""
    box = seen.page.locator(".viewport").bounding_box()
    assert box is not None
    at = {"x": box["x"] + box["width"] * 0.3, "y": box["y"] + box["height"] * 0.6}
    seen.page.mouse.move(at["x"], at["y"])
    seen.wait("document.querySelector('.readout .pixel span') !== null")
    x, y = map(int, re.findall(r"\d+", seen.page.locator(".readout .pixel span").inner_text()))
    drawn = seen.page.evaluate(
        """({ x, y }) => {
            const canvas = document.querySelector('.viewport canvas');
            const { left, top, width, height } = canvas.getBoundingClientRect();
            const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
            copy.drawImage(canvas, 0, 0);
            const place = [(x - left) * canvas.width / width, (y - top) * canvas.height / height].map(Math.floor);
            return Array.from(copy.getImageData(...place, 1, 1).data).slice(0, 3);
        }""",
        at,
    )
    assert drawn == array[y, x].tolist()
    seen.wait(
        "text => document.querySelector('.readout .pixel b').textContent === text", f"({', '.join(map(str, drawn))})"
    )
    seen.page.get_by_role("button", name="Go on").click()


def test_a_paused_picture_stays_steps_and_can_be_saved(seen: Watched, site: Site, tmp_path: Path) -> None:
    """It keeps its seq; a step shows a later frame; NPY and PNG are what is shown; going on shows newer frames."""
    watch(seen, site, "camera")
    seen.page.get_by_label("lossless").check()
    held = pause(seen)
    seen.page.wait_for_timeout(500)  # ten frames further
    assert seen.page.evaluate(SHOWN) == held
    seen.page.keyboard.press(".")
    seen.wait(f"{SHOWN} > {held}")
    stepped, pixels, _ = picture(seen, "image/png")
    assert np.array_equal(pixels, scene(stepped))
    for kind in ("NPY", "PNG"):
        with seen.page.expect_download() as download:
            seen.page.get_by_role("link", name=kind).click()
        download.value.save_as(tmp_path / kind)
    assert np.array_equal(np.load(tmp_path / "NPY"), scene(stepped))
    with Image.open(tmp_path / "PNG") as saved:
        assert np.array_equal(np.asarray(saved), scene(stepped))
    seen.page.get_by_role("button", name="Go on").click()
    seen.wait(f"{SHOWN} > {stepped + 5}")


def test_the_value_under_the_pointer_is_the_array_s(seen: Watched, site: Site) -> None:
    """Of a paused frame of a volume: in the slice that is chosen, whatever the picture's scale is."""
    watch(seen, site, "volume")
    seq = pause(seen)
    array = np.empty(VOLUME, np.uint16)
    Checked().paint(array, seq)
    box = seen.page.locator(".viewport").bounding_box()
    assert box is not None
    for index in (VOLUME[0] // 2, 1):
        slider = seen.page.locator(".slice input")
        slider.fill(str(index))
        seen.page.mouse.move(box["x"] + 10, box["y"] + 5)
        seen.page.mouse.move(box["x"] + box["width"] / 2 + 40 * index, box["y"] + box["height"] / 3)
        seen.wait("document.querySelector('.readout .pixel b')?.textContent.match(/^[0-9]+$/) !== null")
        seen.wait(f"document.querySelector('.slice output').textContent.startsWith('{index} ')")
        x, y = map(int, re.findall(r"\d+", seen.page.locator(".readout .pixel span").inner_text()))
        expected = str(array[index, y, x])
        seen.wait("text => document.querySelector('.readout .pixel b').textContent === text", expected)


def test_profile_and_histogram_are_of_the_frame(seen: Watched, site: Site) -> None:
    """A line drawn with Shift has its ends in the array; the histogram is there, and can be turned off."""
    watch(seen, site, "camera")
    seen.wait(f"{SHOWN} >= 0")
    box = seen.page.locator(".viewport").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2 + 2
    seen.page.keyboard.down("Shift")
    seen.page.mouse.move(box["x"] + box["width"] / 2, middle)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + box["width"] - 2, middle)  # beyond the picture: its last column
    seen.page.mouse.up()
    seen.page.keyboard.up("Shift")
    assert f"(80, 60) to ({SHAPE[1] - 1}, 60)" in seen.page.locator(".side").inner_text()
    seen.wait("document.querySelectorAll('[aria-label=\"values along the line\"] canvas').length === 1")
    histogram = seen.page.get_by_role("button", name="Histogram")
    seen.wait("document.querySelector('.side').innerText.includes('0 … 255')")
    histogram.click()
    seen.wait("!document.querySelector('.side').innerText.includes('0 … 255')")


def test_a_line_of_values_is_drawn_as_a_line(seen: Watched, site: Site) -> None:
    """A one-dimensional array is a plot in the place of the picture."""
    watch(seen, site, "spectrum")
    seen.wait("document.querySelector('.viewport .lines canvas') !== null")
    assert seen.page.locator(".viewport .status").count() == 0


def test_a_colour_map_changes_grey_pictures_only(seen: Watched, site: Site) -> None:
    """`c` takes the next one; a colour camera has none to choose."""
    watch(seen, site, "volume")
    seen.wait(f"{SHOWN} >= 0")
    _, grey, _ = picture(seen, "image/jpeg")
    assert np.abs(np.diff(grey.astype(int), axis=2)).max() <= 3
    seen.page.keyboard.press("c")

    def is_coloured() -> bool:
        data: Any = seen.page.evaluate(READ)["data"]
        pixels = np.array(data, int).reshape(-1, 4)
        return bool(np.abs(pixels[:, 0] - pixels[:, 2]).mean() > 20)

    wait_until(is_coloured, "the picture has the colours of a map")
    assert seen.page.locator(".controls select").first.input_value() == "viridis"
    watch(seen, site, "camera")
    seen.wait(f"{SHOWN} >= 0")
    assert seen.page.locator(".controls select").first.is_disabled()
