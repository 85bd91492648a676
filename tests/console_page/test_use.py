# SPDX-License-Identifier: Apache-2.0
"""The page in a person's hands: keys, light and dark, a phone, recordings; nothing jumps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from tests.console_page.site import PHONE, Site, Watched, running, watched

PLACES: Final = ("/streams", "/streams/{id}", "/recordings/lake/camera", "/services")
SHOWN: Final = "Number(document.querySelector('.viewport canvas')?.dataset.seq)"
# Texts that begin or end outside the page, but those in parts that scroll by themselves.
CUT_OFF: Final = """() => [...document.querySelectorAll('main :is(th, td, dt, dd, h2, button, label, p)')]
    .filter(it => !it.closest('.scroll, .choices') && it.getClientRects().length)
    .filter(it => it.getBoundingClientRect().right > innerWidth || it.getBoundingClientRect().left < 0)
    .map(it => it.outerHTML.slice(0, 80))"""
READY: Final = {
    "/streams": "document.querySelectorAll('tr.stream').length >= 1",
    "/streams/{id}": f"{SHOWN} >= 0 && document.querySelector('.ring canvas') !== null",
    "/recordings/lake/camera": f"{SHOWN} >= 0 && document.querySelector('.track') !== null",
    "/services": "document.querySelectorAll('.findings li').length > 5",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A camera with a reader, and two seconds of it in a lake."""
    lake: Path = tmp_path_factory.mktemp("console") / "lake"
    with running(lakes=[lake]) as site:
        site.start_camera("camera", "--pattern", "scene", "--shape", "60x80x3", "--rate", "20")
        site.start("consume", "camera", "--json", "--timeout", "0")
        site.stream("camera")
        code, output = site.start("record", "camera", "--to", str(lake), "--direct", "--seconds", "2").finish()
        assert code == 0, output
        yield site


def place(site: Site, pattern: str) -> str:
    return pattern.format(id=site.stream("camera")["stream_id"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_a_phone_and_makes_no_complaint(browser: Browser, site: Site, scheme: str) -> None:
    """No view scrolls sideways at the width of a phone; text is dark on light or light on dark."""
    with watched(browser, PHONE, scheme) as seen:
        for pattern in PLACES:
            seen.open(site.url(place(site, pattern)))
            seen.wait(READY[pattern])
            sizes = seen.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert sizes == [PHONE[0], PHONE[0]], pattern
            assert seen.page.evaluate(CUT_OFF) == [], pattern
            if pattern == "/streams":
                seen.page.get_by_label("consumers of camera").click()
                seen.wait("document.querySelector('.consumers td.state') !== null")
                widths = (
                    "[...document.querySelectorAll('tr.stream .name, .consumers .state')].map(it => it.offsetWidth)"
                )
                assert min(seen.page.evaluate(widths)) > 60
        back, front = seen.page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (brightness(back) < brightness(front)) == (scheme == "dark")


def brightness(colour: str) -> int:
    """Of rgb(…)."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_the_page_is_used_by_keyboard_alone(seen: Watched, site: Site) -> None:
    """Views by number, a stream by arrows and Enter, back by Escape, help by a question mark."""
    seen.open(site.url())
    keys = seen.page.keyboard
    seen.wait(READY["/streams"])
    keys.press("j")
    assert seen.page.evaluate("document.activeElement.dataset.row") == str(site.stream("camera")["stream_id"])
    keys.press("e")
    seen.wait("document.querySelectorAll('.consumers tbody tr').length === 1")
    keys.press("Enter")
    seen.wait(READY["/streams/{id}"])
    keys.press(" ")
    seen.wait("document.querySelector('.paused') !== null")
    keys.press(" ")
    seen.wait("document.querySelector('.paused') === null")
    keys.press("Escape")
    seen.wait("location.hash === '#/streams'")
    for key, view in (("2", "recordings"), ("3", "services"), ("1", "streams")):
        keys.press(key)
        seen.wait(f"document.querySelector('nav [aria-current]').getAttribute('href') === '#/{view}'")
    keys.press("?")
    assert seen.page.get_by_role("dialog", name="Keys").is_visible()
    keys.press("2")  # belongs to the dialog
    assert seen.page.evaluate("location.hash") == "#/streams"
    keys.press("Escape")
    seen.wait("document.querySelector('dialog') === null")
    keys.press("/")
    keys.type("2?t")  # letters of a search are no commands
    assert seen.page.get_by_label("Search streams").input_value() == "2?t"
    assert seen.page.evaluate("[location.hash, document.documentElement.dataset.theme]") == ["#/streams", "auto"]


def test_the_colours_can_be_switched_and_stay(seen: Watched, site: Site) -> None:
    """As the system, light, dark; a reload keeps the choice, and sets it before anything is drawn."""
    seen.open(site.url())
    back = "getComputedStyle(document.documentElement).backgroundColor"
    light = seen.page.evaluate(back)
    seen.page.keyboard.press("t")
    assert seen.page.evaluate(back) == light
    seen.page.keyboard.press("t")
    seen.wait(f"{back} !== {light!r}")
    dark = seen.page.evaluate(back)
    seen.page.reload()
    assert seen.page.evaluate(back) == dark


def test_nothing_moves_while_values_change(seen: Watched, site: Site) -> None:
    """While a stream with a long name and large numbers comes, nothing shifts, and columns keep place and width."""
    seen.open(site.url())
    seen.wait(READY["/streams"])
    places = "[...document.querySelectorAll('.streams thead th')].map(it => [it.offsetLeft, it.offsetWidth])"
    before = seen.page.evaluate(places)
    seen.page.evaluate("""() => {
        window.shifts = 0;
        new PerformanceObserver(list => { for (const it of list.getEntries()) window.shifts += it.value; })
            .observe({ type: 'layout-shift' });
    }""")
    name = "zz/of/which/the/name/is/longer/than/any/column"
    site.start_camera(name, "--shape", "1x1x1x2x1080x1920x3", "--rate", "1")
    seen.wait(f"document.querySelector('.streams').innerText.includes('{name}')")
    seen.wait("document.querySelector('.streams').innerText.includes('1×1×1×2')")
    assert seen.page.evaluate(places) == before
    assert seen.page.evaluate("window.shifts") < 0.001  # a row that moves is 0.03, a number that gets longer 0.0001


def test_frames_of_a_recording_are_stepped_sought_and_played(seen: Watched, site: Site) -> None:
    """Seqs of the log: the first one, the next, the last by `End`; play reaches it again; the live one is beside it."""
    timeline = site.get("/api/lakes/lake/timeline?stream=camera")
    (epoch,) = timeline["epochs"]
    seen.open(site.url("/recordings/lake/camera"))
    seen.wait(f"{SHOWN} === {epoch['from_seq']}")
    seen.page.keyboard.press("ArrowRight")
    seen.wait(f"{SHOWN} === {epoch['from_seq'] + 1}")
    seen.page.keyboard.press("End")
    seen.wait(f"{SHOWN} === {epoch['to_seq']}")
    assert str(epoch["epoch"])[-6:] in seen.page.locator(".readout").inner_text()
    seen.page.keyboard.press("Home")
    seen.wait(f"{SHOWN} === {epoch['from_seq']}")
    seen.page.locator("select").first.select_option("4")
    seen.page.keyboard.press(" ")
    seen.wait(f"{SHOWN} === {epoch['to_seq']}")
    marker = "parseFloat(document.querySelector('.marker').style.left)"
    assert seen.page.evaluate(marker) > 99
    seen.page.locator(".track").click(position={"x": 1, "y": 20})
    seen.wait(f"{SHOWN} <= {epoch['from_seq']} + 1 && {marker} < 1")
    seen.page.get_by_label("beside the live one").check()
    seen.wait("Number(document.querySelectorAll('.viewport canvas')[1]?.dataset.seq) > 0")
    (stream,) = site.get("/api/lakes")[0]["streams"]
    facts = seen.page.locator(".facts").inner_text()
    assert f"frames\n{stream['frames']}\n" in facts
    assert f"{sum(stream['lost'].values())}, 0 %" in facts


def test_a_recording_is_started_and_stopped(seen: Watched, site: Site) -> None:
    """Both ask first; the lake has more frames afterwards, and the page says what the recorder says."""
    before = site.get("/api/lakes")[0]["streams"][0]["frames"]
    seen.open(site.url("/recordings"))
    seen.page.get_by_role("button", name="Record…").click()
    seen.page.get_by_label("camera").check()
    seen.page.get_by_role("button", name="Record", exact=True).click()
    seen.wait("document.querySelector('.lake').innerText.includes('recording camera since')")
    seen.wait(f"Number(document.querySelector('.lakes td.num').innerText) > {before}")
    seen.page.get_by_role("button", name="Stop").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    seen.wait("document.querySelector('.recording.off') !== null")
    assert site.get("/api/lakes")[0]["streams"][0]["frames"] > before
