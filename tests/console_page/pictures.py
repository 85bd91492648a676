# SPDX-License-Identifier: Apache-2.0
"""Makes docs/pictures/console-*.png: every view, light and dark, on a laptop and on a phone, of real cameras.

make pictures
"""

from __future__ import annotations

import io
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser

from tests.console_page.site import LAPTOP, PHONE, Site, Watched, chromium, running, watched
from tests.support.processes import ROOT, wait_until
from tests.support.programs import need

FOLDER: Final = ROOT / "docs/pictures"
MAX_BYTES: Final = 300_000
# Colours of signs, light and dark, of src/tensorpool/console/web/css/page.css.
SIGNS: Final = ("0072b2", "b87a00", "c24e00", "56b4e9", "e69f00", "f0772b")
# Name, options of `produce`, and how many read it.
CAMERAS: Final = (
    ("camera/front", ("--pattern", "scene", "--shape", "720x1280x3", "--rate", "30"), 2),
    ("camera/rear", ("--pattern", "scene", "--shape", "480x640x3", "--rate", "20"), 1),
    ("depth/front", ("--pattern", "gradient", "--shape", "480x640", "--dtype", "float32", "--rate", "15"), 1),
    ("ct/volume", ("--pattern", "gradient", "--shape", "32x256x256", "--dtype", "uint16", "--rate", "2"), 0),
    ("spectrum", ("--pattern", "noise", "--shape", "4096", "--dtype", "float32", "--rate", "50"), 1),
)


def prepare(site: Site, lake: Path) -> None:
    """Cameras with readers, one of which stood still for a while, a producer that has ended, and a recording."""
    readers = []
    for name, options, count in CAMERAS:
        site.start_camera(name, *options)
        readers += [site.start("consume", name, "--json", "--timeout", "0") for _ in range(count)]
    ended = site.start_camera("thermal", "--shape", "240x320", "--dtype", "uint16", "--count", "20", "--rate", "20")
    ended.finish()
    names = {name for name, *_ in CAMERAS}
    wait_until(lambda: names <= live(site), "every camera is live")
    readers[0].send(signal.SIGSTOP)
    time.sleep(2.6)  # longer than the ring of camera/front lasts, shorter than a lease
    readers[0].send(signal.SIGCONT)
    recorder = site.start("record", "camera/front", "depth/front", "--to", str(lake), "--direct", "--seconds", "20")
    time.sleep(9)
    recorder.send(signal.SIGSTOP)
    time.sleep(2.6)
    recorder.send(signal.SIGCONT)
    code, output = recorder.finish()
    assert code == 0, output


def live(site: Site) -> set[str]:
    return {it["name"] for it in site.get("/api/state").get("streams", ()) if it["state"] == "live"}


def views(site: Site) -> Iterator[tuple[str, str]]:
    """Name and place of each view."""
    (front,) = [it for it in site.get("/api/state")["streams"] if it["name"] == "camera/front"]
    yield "streams", "/streams"
    yield "stream", f"/streams/{front['stream_id']}"
    yield "recordings", "/recordings/lake/camera/front"
    yield "services", "/services"


def settle(seen: Watched, name: str) -> None:
    """Until the view shows what it is about."""
    if name == "stream":
        seen.wait("Number(document.querySelector('.viewport canvas')?.dataset.seq) > 0")
        if seen.page.viewport_size == {"width": LAPTOP[0], "height": LAPTOP[1]}:
            draw_line(seen)
        seen.page.locator(".viewport").hover()
        seen.wait("document.querySelector('.readout .pixel b')?.textContent.startsWith('(')")
        seen.wait("document.querySelector('.ring canvas') !== null")
    elif name == "streams":
        seen.page.locator("[data-row]").first.focus()
        seen.page.keyboard.press("e")
    elif name == "recordings":
        seen.wait("Number(document.querySelector('.viewport canvas')?.dataset.seq) >= 0")
        seen.page.locator(".track").click(position={"x": 200, "y": 20})
        seen.wait("document.querySelector('.readout b')?.textContent")
    elif name == "services":
        seen.wait(
            "document.querySelectorAll('.findings li').length && document.querySelectorAll('.memory tbody tr').length"
        )
    time.sleep(2.0)  # colours of changes fade, plots get their first points


def draw_line(seen: Watched) -> None:
    """From hills into the sky."""
    seen.page.keyboard.down("Shift")
    seen.page.mouse.move(200, 660)
    seen.page.mouse.down()
    seen.page.mouse.move(860, 240)
    seen.page.mouse.up()
    seen.page.keyboard.up("Shift")


def save(seen: Watched, name: str) -> None:
    """As a PNG that is small enough for a repository: of 256 colours where more take too much."""
    seen.page.evaluate("scrollTo(0, 0)")
    picture = Image.open(io.BytesIO(seen.page.screenshot())).convert("RGB")
    path = FOLDER / f"console-{name}.png"
    picture.save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES // 2:
        palette = picture.quantize(256 - len(SIGNS), method=Image.Quantize.MEDIANCUT)
        colours = bytes(palette.getpalette() or ())[: 3 * (256 - len(SIGNS))]
        palette.putpalette(colours + b"".join(map(bytes.fromhex, SIGNS)))  # rare, and what the page is about
        picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, (path, path.stat().st_size)
    print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size // 1000} kB")


def draw(site: Site, browser: Browser) -> None:
    for scheme in ("light", "dark"):
        for device, size in (("laptop", LAPTOP), ("phone", PHONE)):
            with watched(browser, size, scheme) as seen:
                for name, place in views(site):
                    seen.open(site.url(place))
                    settle(seen, name)
                    save(seen, f"{name}-{scheme}" + ("-phone" if device == "phone" else ""))


def main() -> None:
    need("inter")
    with tempfile.TemporaryDirectory() as folder:
        lake = Path(folder) / "lake"
        with running(lakes=[lake]) as site, chromium() as browser:
            prepare(site, lake)
            draw(site, browser)


if __name__ == "__main__":
    main()
