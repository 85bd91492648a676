# SPDX-License-Identifier: Apache-2.0
"""The state that pages get: the supervisor's view and the producers' own counts, once for all of them."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensorpool as tp
from tensorpool.console.history import MAX_STREAMS, POINT_NS, POINTS, History
from tensorpool.console.server import Console, ConsoleOptions
from tensorpool.console.state import MAX_CHANGES, complete
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.supervisor import Supervisor
from tests.console.conftest import MakeCamera, noise
from tests.console.page import Site
from tests.support.processes import wait_until

ADDED = {"ring_s", "commands", "is_console"}


@pytest.fixture(scope="module")
def supervisor(pool: tp.Local) -> Iterator[Supervisor]:
    config = SupervisorConfig.of(pool.config, http="127.0.0.1:0")
    with Supervisor(config, aeron_dir=pool.aeron_dir) as supervisor:
        yield supervisor


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what changes from one moment to the next, and what the console adds."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.endswith(("age_ns", "held_ns", "_hz")) and key not in ADDED
        }
        for row in rows
    ]


def test_the_state_is_the_supervisors_view(pool: tp.Local, supervisor: Supervisor, camera: MakeCamera) -> None:
    """Of a console at a running supervisor: the same streams, consumers, leases and services, row by row."""
    one = camera(noise((8, 8)), rate_hz=100)
    url = f"http://{supervisor.http_address}"
    with (
        Console(pool.config, pool.aeron_dir, ConsoleOptions(supervisor=url)) as console,
        Site.of(console).states() as states,
    ):
        assert states.hello["supervisor"] == url
        states.until(lambda state: has(state, one.stream_id), "the stream is there")
        one.stop()

        def is_same(state: dict[str, Any]) -> bool:
            view = json.loads(urllib.request.urlopen(f"{url}/view").read())
            tables = ("streams", "consumers", "leases", "services")
            return state["type"] == "state" and all(
                steady(state[table]) == steady(view[table]) and view["streams"] for table in tables
            )

        state = states.until(is_same, "the state is the supervisor's view")
        assert row_of(state, one.stream_id)["seq"] == one.producer.next_seq - 1


def test_the_state_has_the_producers_own_counts(site: Site, camera: MakeCamera, client: tp.Client) -> None:
    """Of a console with its own observer: seq, epoch, shape, drops of a consumer that read too late, slots, depth."""
    one = camera(noise((8, 16), "float32"), rate_hz=100)
    with site.states() as states, client.consumer(one.stream_id) as reader:
        state = states.until(
            lambda state: has(state, one.stream_id) and row_of(state, one.stream_id)["rate_hz"], "it has a rate"
        )
        row = row_of(state, one.stream_id)
        assert row["ring_s"] == pytest.approx(64 / row["rate_hz"])
        one.stop()
        while reader.poll(0.1) is not None:
            pass
        last = one.producer.next_seq - 1
        state = states.until(
            lambda state: (
                row_of(state, one.stream_id)["seq"] == last and consumer_of(state, reader)["last_seq"] == last
            ),
            "both have reported the last seq",
        )
        row = row_of(state, one.stream_id)
        assert (row["name"], row["epoch"], row["consumers"]) == (one.name, reader.epoch, 1)
        assert (row["shape"], row["dtype"], row["frame_bytes"]) == ([8, 16], "float32", 512)
        assert last + 1 == one.producer.stats.published
        consumer = consumer_of(state, reader)
        stats = reader.stats
        assert (consumer["lag"], consumer["drops_gap"], consumer["drops_late"]) == (
            0,
            stats.drops_gap,
            stats.drops_late,
        )
        assert not consumer["is_console"]
        (driver,) = [service for service in state["services"] if service["service"] == "driver"]
        assert driver["commands"] == ["status", "log-level", "drain"]
        details = site.get(f"/api/streams/{one.stream_id}").json
        assert details["stream"]["seq"] == last
        assert [row["consumer_id"] for row in details["consumers"]] == [reader.consumer_id]
        assert {row["role"] for row in details["leases"]} == {"PRODUCER", "CONSUMER"}
        slots = details["slots"]
        assert (slots["nslots"], slots["newest"], slots["states"].count("c")) == (64, last, min(64, last + 1))


def test_states_are_numbered_and_all_pages_get_the_same(site: Site) -> None:
    """Two pages and the API have the same message for the same number."""
    with site.states() as first, site.states() as second:
        found: dict[int, dict[str, Any]] = {}
        for _ in range(3):
            state = first.next()
            found[state["number"]] = state
        shared = [state for state in (second.next() for _ in range(3)) if state["number"] in found]
        assert shared
        assert all(state == found[state["number"]] for state in shared)


def test_without_the_supervisor_pages_are_told_and_then_it_goes_on(pool: tp.Local) -> None:
    """`gone` with the reason while it does not answer, states again when it does."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with Console(pool.config, pool.aeron_dir, ConsoleOptions(supervisor=url)) as console:
        site = Site.of(console)
        with site.states() as states:
            gone = states.until(lambda message: "does not answer" in message.get("why", ""), "it is gone")
            assert gone["type"] == "gone"
            assert url in gone["why"]
            answer = site.get("/api/streams/1")
            assert (answer.status, url in answer.json["error"]) == (503, True)
            config = SupervisorConfig.of(pool.config, http=f"127.0.0.1:{port}", instance_id="supervisor-02")
            with Supervisor(config, aeron_dir=pool.aeron_dir):
                states.until(lambda message: message["type"] == "state" and message["services"], "it is back")
            states.until(lambda message: message["type"] == "gone", "it is gone again")


def test_what_is_no_supervisor_is_said(pool: tp.Local, site: Site) -> None:
    """Another web server at that address: 404s and pages that are no view."""
    with (
        Console(pool.config, pool.aeron_dir, ConsoleOptions(supervisor=f"http://{site.address}")) as console,
        Site.of(console).states() as states,
    ):
        states.until(lambda message: "does not answer" in message.get("why", ""), "it says so")


def test_memory_and_doctor(site: Site, camera: MakeCamera) -> None:
    """What the files of an epoch take, and the findings of the command."""
    one = camera(noise((8, 8)))

    def current() -> list[dict[str, Any]]:
        memory = site.get("/api/memory").json
        return [row for row in memory["streams"] if row["is_current"] and row["name"] == one.name]

    wait_until(current, "the stream is in the state, with its name")
    (row,) = current()
    memory = site.get("/api/memory").json
    assert row["stream_id"] == one.stream_id
    assert row["bytes"] >= 64 * (256 + (1 << 12))
    assert 0 < memory["free_bytes"] <= memory["total_bytes"]
    found = site.get("/api/doctor").json
    assert {finding["check"] for finding in found["findings"]} >= {"python", "media driver", "space"}
    assert found["failures"] == sum(finding["level"] == "FAIL" for finding in found["findings"])


def has(state: dict[str, Any], stream_id: int) -> bool:
    return any(row["stream_id"] == stream_id for row in state.get("streams", ()))


def row_of(state: dict[str, Any], stream_id: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [row for row in state["streams"] if row["stream_id"] == stream_id]
    return rows[0]


def consumer_of(state: dict[str, Any], consumer: tp.Consumer) -> dict[str, Any]:
    rows = [row for row in state["consumers"] if row["consumer_id"] == consumer.consumer_id]
    return rows[0] if rows else {"last_seq": None}


# --- without a console


def view(now_ns: int, drops: int = 0, streams: int = 1) -> dict[str, Any]:
    rows = [{"stream_id": at, "rate_hz": 30.0, "bytes_per_s": 900.0, "nslots": 60} for at in range(streams)]
    consumers = [{"stream_id": 0, "consumer_id": 5, "drops_gap": drops, "drops_late": 1}]
    changes = [{"number": number} for number in range(1000)]
    return {"time_ns": now_ns, "streams": rows, "consumers": consumers, "services": [], "changes": changes}


def test_ten_minutes_are_kept_one_point_in_five_seconds() -> None:
    """Older points go; drops are those since the point before; a stream that vanished is forgotten."""
    history = History()
    for second in range(700):
        history.add(view(second * 1_000_000_000, drops=second))
    (columns,) = history.columns().values()
    assert len(columns["t"]) == POINTS
    assert set(np.diff(columns["t"])) == {POINT_NS}
    assert columns["t"][-1] == 695 * 1_000_000_000
    assert set(columns["drops"]) == {5}
    assert set(columns["rate"]) == {30.0}
    history.add(view(0, streams=2))  # the wall clock was set back
    assert list(history.columns()) == ["0", "1"]
    history.add(view(POINT_NS, streams=0))
    assert history.columns() == {}


def test_the_history_is_bounded() -> None:
    """However many streams there are."""
    history = History()
    history.add(view(0, streams=MAX_STREAMS + 50))
    assert len(history.columns()) == MAX_STREAMS


def test_a_state_is_completed_for_pages() -> None:
    """Depth of the ring in seconds, own consumers marked, the latest changes only."""
    state = view(0)
    complete(state, {5})
    assert state["streams"][0]["ring_s"] == 2.0
    assert state["consumers"][0]["is_console"]
    assert [change["number"] for change in state["changes"]] == list(range(1000 - MAX_CHANGES, 1000))
