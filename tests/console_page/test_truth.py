# SPDX-License-Identifier: Apache-2.0
"""What the page says is what the supervisor's view says, and what producers and consumers count themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from tensorpool.cli.format import MIB, age, number, shape, size
from tensorpool.client import Consumer
from tensorpool.driver import DriverConfig
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.observer import Observer
from tests.console_page.site import Site, Watched, running
from tests.support.disc_client import unused_udp_channel
from tests.support.processes import wait_until

NOTHING: Final = "–"
# Which state is shown, and every cell of every row, read at one moment.
TABLE: Final = """() => ({
    number: Number(document.querySelector('.asof time').dataset.number),
    rows: Object.fromEntries([...document.querySelectorAll('tr.stream')].map(row => [
        row.dataset.stream,
        Object.fromEntries([...row.children].map(it => [it.className, it.innerText.trim().replace(/\\s+/g, ' ')])),
    ])),
})"""
CONSUMERS: Final = """() => [...document.querySelectorAll('.consumers tbody tr')]
    .map(row => [...row.children].map(it => it.innerText.trim()))"""
FACTS: Final = """() => Object.fromEntries([...document.querySelectorAll('.facts dl > div')]
    .map(fact => [fact.querySelector('dt').innerText, fact.querySelector('dd').innerText]))"""


BRIDGE: Final = """
[bridge]
instance_id = "{role}"
role = "{role}"
payload_channel = "{channels[0]}"
payload_stream_id = 50001
control_channel = "{channels[1]}"
control_stream_id = 50002
metadata_channel = "{channels[2]}"
metadata_stream_id = 50003

[[mappings]]
source_stream_id = {source}
dest_stream_id = 29000
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Two cameras with a reader."""
    with running() as site:
        site.start_camera("camera/front", "--shape", "120x160x3", "--rate", "30")
        site.start_camera("depth", "--shape", "48x64", "--dtype", "float32", "--rate", "5")
        site.stream("camera/front")
        site.stream("depth")
        site.start("consume", "camera/front", "--json", "--timeout", "0")
        yield site


def dash(text: str) -> str:
    """As the page writes what is not known."""
    return NOTHING if text == "-" else text


def cells(stream: dict[str, Any], consumers: list[dict[str, Any]]) -> dict[str, str]:
    """What the row of a stream must say, written by the functions of the command line."""
    lost = sum(it["drops_gap"] + it["drops_late"] for it in consumers)
    dtype = f"{shape(tuple(stream['shape']))} {stream['dtype']}".replace("x", "×")
    bytes_per_s = stream["bytes_per_s"]
    frame_age_ns = stream["frame_age_ns"]
    epoch = str(stream["epoch"])
    return {
        "name": f"{stream['name']}{stream['stream_id']}",
        "frame": dtype,
        "num hz": dash(number(stream["rate_hz"])),
        "num": dash(number(None if bytes_per_s is None else bytes_per_s / MIB)),
        "num age": dash(age(None if frame_age_ns is None else frame_age_ns / 1e9)),
        "num ring": NOTHING if stream["ring_s"] is None else f"{number(stream['ring_s'])} s",
        "num epoch": epoch if len(epoch) <= 7 else f"…{epoch[-6:]}",
        "num lag": str(max((it["lag"] or 0 for it in consumers), default=0)) if consumers else NOTHING,
        "num lost": str(lost),
    }


def test_the_table_says_what_the_supervisor_says(seen: Watched, site: Site) -> None:
    """Every cell of three states, written as the command line writes it; signs stand beside the words."""
    seen.open(site.url())
    known: set[int] = set()
    while len(known) < 3:
        found = seen.page.evaluate(TABLE)
        state = seen.states.get(found["number"])
        if state is None or found["number"] in known or len(found["rows"]) < 2:
            seen.page.wait_for_timeout(50)
            continue
        known.add(found["number"])
        assert {int(id) for id in found["rows"]} == {it["stream_id"] for it in state["streams"]}
        for stream in state["streams"]:
            consumers = [it for it in state["consumers"] if it["stream_id"] == stream["stream_id"]]
            row = found["rows"][str(stream["stream_id"])]
            expected = cells(stream, consumers)
            assert {name: row[name] for name in expected} == expected
            assert row["state"] == f"{'●' if stream['state'] == 'live' else '○'} {stream['state']}"
            assert row["readers"].endswith(str(len(consumers)))


def test_the_view_is_that_of_any_supervisor(seen: Watched, site: Site) -> None:
    """An observer of our own, beside the console's, knows the same streams, epochs, producers and consumers."""
    seen.open(site.url())
    config = DriverConfig.load(overrides={"shm.base_dir": site.base_dir})
    with Observer(site.aeron_dir, SupervisorConfig.of(config)) as observer:

        def facts(streams: Any, consumers: Any) -> tuple[set[Any], set[Any]]:
            return (
                {(it["stream_id"], it["name"], it["epoch"], it["producer_id"], it["dtype"]) for it in streams},
                {(it["stream_id"], it["consumer_id"]) for it in consumers},
            )

        def is_equal() -> bool:
            own = msgspec.to_builtins(observer.snapshot())
            seen.page.wait_for_timeout(50)
            shown = max(seen.states.items())[1] if seen.states else {"streams": (), "consumers": ()}
            found = facts(shown["streams"], shown["consumers"])
            return len(found[0]) == 2 and len(found[1]) == 1 and found == facts(own["streams"], own["consumers"])

        wait_until(is_equal, "both views agree")


def test_counts_are_those_of_the_producer_and_the_consumer(seen: Watched, site: Site) -> None:
    """A producer of 137 frames and a consumer that was too slow for most of them, each by its own count."""
    with (
        site.client() as client,
        client.producer("counted", create=True) as producer,
        client.consumer("counted") as consumer,
    ):
        for value in range(137):
            producer.publish(np.full((8, 8), value, np.uint8))
        lost = read_all(consumer, upto=136)
        assert lost > 0
        wait_until(lambda: reported(site, consumer.consumer_id) == lost, "its reports have arrived")
        stream = next(it for it in site.get("/api/state")["streams"] if it["name"] == "counted")
        seen.open(site.url(f"/streams/{stream['stream_id']}"))
        seen.wait("document.querySelector('.facts')?.innerText.includes('seq 136')")
        facts = seen.page.evaluate(FACTS)
        assert facts["frame"] == "8×8 uint8 64 B"
        assert facts["epoch"].split()[0] == str(stream["epoch"])  # of 19 digits, more than a number of JavaScript has
        assert int(facts["producer"]) == stream["producer_id"]
        seen.wait(f"document.querySelector('.consumers tbody')?.innerText.includes('{consumer.consumer_id}')")
        (row,) = [row for row in seen.page.evaluate(CONSUMERS) if row[0] == str(consumer.consumer_id)]
        assert int(row[5]) + int(row[6]) == lost


def read_all(consumer: Consumer, upto: int) -> int:
    """Receive what is left of the frames: how many were lost, by the consumer's own count."""
    while (frame := consumer.poll(timeout=10)) is not None:
        with frame:
            if frame.seq == upto:
                break
    return sum(consumer.stats.drops.values())


def reported(site: Site, consumer_id: int) -> int | None:
    """How many frames a consumer has lost, by its reports; None before the first."""
    consumers = {it["consumer_id"]: it for it in site.get("/api/state")["consumers"]}
    found = consumers.get(consumer_id)
    return None if found is None else found["drops_gap"] + found["drops_late"]


def test_search_filter_and_order(seen: Watched, site: Site) -> None:
    """Only streams that match are listed; a heading sorts by its column, and again the other way round."""
    seen.open(site.url())
    names = "[...document.querySelectorAll('tr.stream a[data-row]')].map(it => it.innerText)"
    seen.wait(f"{names}.length >= 2")
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("dep flo")
    seen.wait(f"JSON.stringify({names}) === '[\"depth\"]'")
    seen.page.get_by_label("Search streams").fill("")
    seen.page.get_by_role("button", name="stale").click()
    seen.wait("document.querySelector('.empty')?.innerText === 'No stream matches.'")
    seen.page.get_by_role("button", name="all", exact=False).first.click()
    seen.page.get_by_role("button", name="Hz", exact=True).click()
    seen.wait(f"{names}[0] === 'camera/front'")
    assert seen.page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    seen.page.get_by_role("button", name="Hz", exact=True).click()
    seen.wait(f"{names}.at(-1) === 'camera/front'")


def test_services_memory_and_findings(seen: Watched, site: Site) -> None:
    """The driver's pid and state, memory of each stream as the console measured it, doctor's findings, and events."""
    seen.open(site.url("/services"))
    row = seen.page.locator('[data-service^="service:driver"]')
    assert str(site.driver.pid) in row.inner_text()
    assert "● running" in row.inner_text().replace("\n", " ")
    seen.wait("document.querySelectorAll('.memory tbody tr').length >= 2")
    texts = seen.page.locator(".memory tbody tr").all_inner_texts()
    for entry in site.get("/api/memory")["streams"]:
        if entry["is_current"] and entry["name"] in ("camera/front", "depth"):
            assert any(text.startswith(entry["name"]) and sized(entry["bytes"]) in text for text in texts)
    seen.wait("document.querySelectorAll('.findings li').length > 5")
    findings = site.get("/api/doctor")["findings"]
    assert sorted(seen.page.locator(".findings b").all_inner_texts()) == sorted(it["check"] for it in findings)
    seen.wait("document.querySelector('.events').innerText.includes('stream appeared')")


def sized(count: int) -> str:
    """A size as the page writes it, with at least three digits, so that a column of them is easy to compare."""
    unit = size(count).split()[1]
    return f"{number(count / {'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30}[unit])} {unit}"


def test_a_command_asks_first_and_then_changes_the_service(seen: Watched, site: Site) -> None:
    """Cancelled, nothing is sent; agreed, the driver logs at the new level and the page says so."""
    seen.open(site.url("/services"))
    choice = seen.page.get_by_label("log level of service:driver", exact=False)
    choice.select_option("debug")
    seen.page.get_by_role("button", name="Cancel").click()
    assert log_level(seen) == "error"
    choice.select_option("debug")
    seen.page.get_by_role("button", name="Change").click()
    seen.wait("document.querySelector('.notices').innerText.includes('log-level: debug')")
    assert log_level(seen) == "debug"


def log_level(seen: Watched) -> str:
    """As the driver answers."""
    return str(
        seen.page.evaluate("""async () => {
            const tag = document.querySelector('[data-service^="service:driver"]').dataset.service;
            const options = { method: 'POST', body: JSON.stringify({ command: 'status' }) };
            const answer = await fetch(`/api/services/${encodeURIComponent(tag)}/commands`, options);
            const { result } = await answer.json();
            return (typeof result === 'string' ? JSON.parse(result) : result).log_level;
        }""")
    )


def test_bridges_show_what_they_carry(seen: Watched, site: Site, tmp_path: Path) -> None:
    """A sender and a receiver: both carry the camera's rate, and what each counts is what its status says."""
    source = site.stream("camera/front")["stream_id"]
    channels = [unused_udp_channel() for _ in range(3)]
    for role in ("sender", "receiver"):
        path = tmp_path / f"{role}.toml"
        path.write_text(BRIDGE.format(role=role, source=source, channels=channels))
        site.start("bridge", "--config", str(path))
    seen.open(site.url("/services"))
    for role, verb in (("sender", "sends"), ("receiver", "receives")):
        seen.wait(
            """([role, verb]) => {
                const panel = [...document.querySelectorAll('main > section')].find(it =>
                    it.querySelector('h2')?.innerText.startsWith(`bridge:${role}`));
                const cells = [...(panel?.querySelectorAll('tbody tr > *') ?? [])].map(it => it.innerText);
                return cells[1] === verb && Math.abs(Number(cells[2]) - 30) < 10 && Number(cells[4]) > 30;
            }""",
            [role, verb],
        )


LEASES: Final = """() => [...document.querySelectorAll('.leases tbody tr')]
    .map(row => [row.querySelector('.process').innerText.trim(), row.querySelector('.process span').title])"""


def test_leases_name_the_processes_that_hold_them(site: Site, seen: Watched) -> None:
    """User, pid and program; the command line is the tip. What a process calls itself is text, not HTML."""
    html = "<img src=x onerror=alert(1)>"
    process = site.start_camera(html, "--shape", "48x64", "--rate", "5")
    stream = site.stream(html)
    seen.open(site.url(f"/streams/{stream['stream_id']}"))
    seen.wait(f"() => document.querySelector('.leases .process')?.innerText.includes('{process.pid}')")
    ((shown, command),) = [row for row in seen.page.evaluate(LEASES) if str(process.pid) in row[0].split()]
    assert shown.split()[1:] == [str(process.pid), "tensorpool"]
    assert html in command
    assert seen.page.evaluate("() => document.querySelectorAll('.leases img').length") == 0
