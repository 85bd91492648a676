# SPDX-License-Identifier: Apache-2.0
"""What ends, freezes or restarts: the page shows it within two seconds, and recovers without a reload."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.console_page.site import Site, Watched, running
from tests.support.processes import Process

SHOWN_WITHIN_NS: Final = 2_000_000_000
OPTIONS: Final = ("--pattern", "scene", "--shape", "60x80x3", "--rate", "20")
STATE: Final = "document.querySelector('.title .sign')?.innerText.replace(/\\s+/g, ' ')"
SHOWN: Final = "Number(document.querySelector('.viewport canvas')?.dataset.seq)"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running() as site:
        yield site


def changed_ns(seen: Watched, kind: str, stream_id: int, after_ns: int) -> int:
    """When the supervisor noticed a change of this kind, by the states that the page was sent."""

    def find() -> int | None:
        for state in seen.states.values():
            for change in state["changes"]:
                if change["kind"] == kind and change["stream_id"] == stream_id and change["time_ns"] > after_ns:
                    return int(change["time_ns"])
        return None

    found = find()
    assert found is not None, f"no {kind} in {sorted(seen.states)}"
    return found


def shown_ns(seen: Watched, expression: str) -> int:
    """When an expression of JavaScript was true."""
    seen.wait(expression)
    return time.time_ns()


def test_a_killed_producer_is_shown_and_its_successor_too(seen: Watched, site: Site) -> None:
    """The stream has no producer, and its picture fades; another producer makes it live, with new pictures."""
    camera = site.start_camera("killed", *OPTIONS)
    id = site.stream("killed")["stream_id"]
    seen.open(site.url(f"/streams/{id}"))
    seen.wait(f"{STATE} === '● live' && {SHOWN} > 0")
    began_ns = time.time_ns()
    camera.send(signal.SIGKILL)
    at_ns = shown_ns(seen, f"{STATE} === '– no producer'")
    assert at_ns - changed_ns(seen, "producer left", id, began_ns) < SHOWN_WITHIN_NS
    seen.wait("document.querySelector('.picture.over') !== null")
    site.start_camera("killed", *OPTIONS)
    seen.wait(f"{STATE} === '● live' && document.querySelector('.picture.over') === null")
    epoch = site.stream("killed")["epoch"]
    seen.wait(f"document.querySelector('.facts').innerText.includes('{epoch}')")
    before = seen.page.evaluate(SHOWN)
    seen.wait(f"{SHOWN} !== {before}")


def test_a_frozen_consumer_is_shown(seen: Watched, site: Site) -> None:
    """SIGSTOP: it is stale, in the list and in the totals; SIGCONT: it is fine again."""
    site.start_camera("frozen", *OPTIONS)
    id = site.stream("frozen")["stream_id"]
    consumer = site.start("consume", "frozen", "--json", "--timeout", "0")
    seen.open(site.url())
    row = f"document.querySelector('[data-stream=\"{id}\"] .readers')?.innerText.replace(/\\s+/g, ' ')"
    seen.wait(f"{row}.endsWith('● 1')")
    seen.page.locator(f'[data-row="{id}"]').focus()
    seen.page.keyboard.press("e")
    cell = "document.querySelector('.consumers td.state')?.innerText.replace(/\\s+/g, ' ')"
    seen.wait(f"{cell} === '● ok'")
    began_ns = time.time_ns()
    consumer.send(signal.SIGSTOP)
    at_ns = shown_ns(seen, f"{cell} === '✕ stale' || {cell} === '✕ expired'")
    noticed = "consumer stale" if "stale" in seen.page.evaluate(cell) else "consumer expired"
    assert at_ns - changed_ns(seen, noticed, id, began_ns) < SHOWN_WITHIN_NS
    seen.wait(f"{row}.endsWith('✕ 1')")
    consumer.send(signal.SIGCONT)  # it attaches again, where its lease has expired as a new consumer
    seen.wait("[...document.querySelectorAll('.consumers td.state')].some(it => it.innerText.endsWith('ok'))")


def test_a_restarted_driver_is_shown_and_recovered_from(seen: Watched, site: Site) -> None:
    """Without a media driver the page says so and how old it is; a new one brings the camera back by itself."""
    site.start_camera("restarted", *OPTIONS)
    id = site.stream("restarted")["stream_id"]
    seen.open(site.url(f"/streams/{id}"))
    seen.wait(f"{STATE} === '● live' && {SHOWN} > 0")
    site.driver.send(signal.SIGTERM)
    site.driver.finish()
    said_ns = when(lambda: site.get("/api/state")["type"] == "gone")
    at_ns = shown_ns(seen, "document.querySelector('.notice').innerText.includes('no media driver is alive')")
    assert at_ns - said_ns < SHOWN_WITHIN_NS
    seen.wait("document.querySelector('.asof').innerText.includes('old')")
    assert seen.page.locator("main.faded").count() == 1
    site.start_driver()
    seen.wait("document.querySelector('.notice').dataset.isShown === 'no'")
    seen.wait(f"{STATE} === '● live' && document.querySelector('main.faded') === null")
    before = seen.page.evaluate(SHOWN)
    seen.wait(f"{SHOWN} !== {before}")
    expect_only(seen.complaints, "503")  # of a request that was under way when the driver ended


def when(is_true: Callable[[], bool]) -> int:
    """The first moment at which a condition was true."""
    while not is_true():
        time.sleep(0.02)
    return time.time_ns()


def test_a_frozen_console_makes_the_page_old_and_a_new_one_fresh(seen: Watched, site: Site) -> None:
    """The age grows while nothing comes; a console that was killed and started again is found without a reload."""
    seen.open(site.url())
    site.console.send(signal.SIGSTOP)
    try:
        age = "document.querySelector('.asof.old time')?.innerText"
        first = seen.wait(age)
        seen.wait(f"{age} > {first!r}")
        assert "sends nothing" in seen.page.locator(".notice").inner_text()
    finally:
        site.console.send(signal.SIGCONT)
    seen.wait("document.querySelector('.asof.old') === null")
    end(site.console)
    seen.wait("document.querySelector('.notice').innerText.includes('does not answer')")
    site.start_console()
    seen.wait(
        "document.querySelector('.asof.old') === null && document.querySelector('.notice').dataset.isShown === 'no'"
    )
    expect_only(seen.complaints, "ERR_CONNECTION")  # Chromium reports each attempt to reach what is not there


def end(process: Process) -> None:
    process.send(signal.SIGKILL)
    process.finish()


def expect_only(complaints: list[str], text: str) -> None:
    """The browser may complain about this and about nothing else."""
    assert not [complaint for complaint in complaints if text not in complaint], complaints
    complaints.clear()
