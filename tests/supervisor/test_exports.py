# SPDX-License-Identifier: Apache-2.0
"""What is served: metrics whose names and texts are an interface, JSON, health, and a dashboard that fits them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tensorpool import aeron
from tensorpool.clock import ManualClock
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.exports import Exports
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import ChangeKind, ConsumerState, StreamState
from tensorpool.telemetry.metrics import aeron_metrics, counter
from tensorpool.wire.driver import Role
from tests.supervisor.conftest import (
    CONSUMER,
    PRODUCER,
    STREAM,
    S,
    alive,
    announce,
    consumed,
    hello,
    kept,
    named,
    produced,
)
from tests.support.processes import ROOT, wait_until

DASHBOARD = ROOT / "dashboards" / "tensorpool.json"
LABELS = {"stream_id": str(STREAM), "name": 'cam"era\nfront'}
METRICS = set(
    re.findall(
        r"\S+",
        """
        tensorpool_streams tensorpool_stream_rate_hertz tensorpool_stream_bytes_per_second tensorpool_stream_frame_bytes
        tensorpool_stream_seq tensorpool_stream_epoch_changes_total tensorpool_stream_slots tensorpool_stream_consumers
        tensorpool_stream_up tensorpool_stream_has_producer tensorpool_stream_announced_age_seconds
        tensorpool_stream_frame_age_seconds tensorpool_stream_activity_age_seconds
        tensorpool_consumers tensorpool_consumer_lag_frames tensorpool_consumer_rate_hertz
        tensorpool_consumer_age_seconds tensorpool_consumer_up tensorpool_consumer_lagging tensorpool_consumer_dropping
        tensorpool_consumer_rate_limited tensorpool_consumer_drops_total
        tensorpool_leases tensorpool_service_up tensorpool_service_state tensorpool_service_age_seconds
        tensorpool_changes_total tensorpool_aeron_total tensorpool_aeron_level tensorpool_aeron_resources
        tensorpool_control_held_bytes
        tensorpool_supervisor_messages_total tensorpool_supervisor_overflow_total tensorpool_supervisor_connected
        tensorpool_supervisor_overrides_total tensorpool_build_info tensorpool_healthy
        tensorpool_log_lines_dropped_total
        """,
    )
)
CONSUMER_LABELS = {**LABELS, "consumer_id": str(CONSUMER)}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10 * S, 1_000 * S)


@pytest.fixture
def exports(clock: ManualClock, shm_dir: Path) -> Exports:
    """Of a view with a stream, a consumer, a service and two leases; there is no media driver."""
    observer = Observer(str(shm_dir / "nothing"), SupervisorConfig.load(environ={}), clock=clock)
    view = observer.view
    for second in range(1, 11):
        now_ns = second * S
        view.on_message(announce(now_ns=now_ns), now_ns)
        view.on_message(named(LABELS["name"]), now_ns)
        view.on_message(produced(second * 100), now_ns)
        view.on_message(hello(), now_ns)
        view.on_message(consumed(second * 100 - 40, drops_gap=7, drops_late=3), now_ns)
        view.on_message(kept(PRODUCER, Role.PRODUCER, 1), now_ns)
        view.on_message(kept(CONSUMER, Role.CONSUMER, 2), now_ns)
        view.on_message(alive("paused"), now_ns)
        view.tick(now_ns)
    return Exports(observer, lambda: [counter("tensorpool_supervisor_overrides", "Overrides.", 3)])


def samples(exports: Exports) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """By name and labels."""
    answer = exports.routes["/metrics"]()
    assert (answer.status, answer.content_type.partition(";")[0]) == (200, "text/plain")
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def test_metrics_say_what_the_view_knows(exports: Exports) -> None:
    """Values, labels and states; names are escaped."""
    found = samples(exports)

    def value(metric: str, /, **labels: str) -> float:
        return found[metric][frozenset(labels.items())]

    assert value("tensorpool_stream_rate_hertz", **LABELS) == pytest.approx(100)
    assert value("tensorpool_stream_seq", **LABELS) == 1000
    assert value("tensorpool_stream_epoch_changes_total", **LABELS) == 0
    assert value("tensorpool_stream_up", **LABELS) == 1
    assert value("tensorpool_stream_has_producer", **LABELS) == 1
    assert value("tensorpool_stream_consumers", **LABELS) == 1
    assert value("tensorpool_streams", state="live") == 1
    assert value("tensorpool_streams", state="stale") == 0
    assert value("tensorpool_consumer_lag_frames", **CONSUMER_LABELS) == 40
    assert value("tensorpool_consumer_lagging", **CONSUMER_LABELS) == 1
    assert value("tensorpool_consumer_up", **CONSUMER_LABELS) == 1
    assert value("tensorpool_consumer_drops_total", **CONSUMER_LABELS, reason="gap") == 7
    assert value("tensorpool_consumer_drops_total", **CONSUMER_LABELS, reason="late") == 3
    assert value("tensorpool_consumers", state="lagging") == 1
    assert value("tensorpool_service_state", service="bridge", instance="b1", state="paused") == 1
    assert value("tensorpool_leases", role="producer") == 1
    assert value("tensorpool_changes_total", kind="consumer lagging") == 1
    assert value("tensorpool_supervisor_messages_total", kind="QosConsumer") == 10
    assert value("tensorpool_supervisor_overrides_total") == 3
    assert value("tensorpool_supervisor_connected") == 0
    assert "tensorpool_stream_bytes_per_second" not in found  # the frame size is unknown


def test_metric_names_and_labels_are_these(exports: Exports) -> None:
    """They change only on purpose: dashboards and alerts rest on them."""
    body = exports.routes["/metrics"]().body.decode()
    assert set(re.findall(r"^# TYPE (tensorpool_\S+)", body, re.M)) == METRICS
    assert set(re.findall(r"^# HELP (tensorpool_\S+) \S", body, re.M)) == METRICS
    labels = {label for found in samples(exports).values() for key in found for label, _ in key}
    assert labels == {
        "stream_id",
        "name",
        "consumer_id",
        "reason",
        "state",
        "kind",
        "role",
        "service",
        "instance",
        "instance_id",
        "version",
    }


def test_states_and_kinds_have_a_sample_each_from_the_start(exports: Exports) -> None:
    """A rate of a counter that appears with its first event would miss that event."""
    found = samples(exports)
    assert {dict(key)["state"] for key in found["tensorpool_streams"]} == set(StreamState)
    assert {dict(key)["state"] for key in found["tensorpool_consumers"]} == set(ConsumerState)
    assert {dict(key)["kind"] for key in found["tensorpool_changes_total"]} == set(ChangeKind)
    assert len(found["tensorpool_supervisor_overflow_total"]) == 4


def test_the_media_drivers_counters_are_exported(shared_media_driver: aeron.MediaDriver, connect: Any) -> None:
    """By name, without versions and thread names in them; levels apart from totals."""
    client = connect(shared_media_driver)
    client.add_publication("aeron:ipc?term-length=64k", 61_990)
    total, level, resources = aeron_metrics(client.counters())
    names = {sample.labels["counter"] for sample in total.samples}
    assert {"bytes_sent", "bytes_received", "errors", "naks_sent", "client_liveness_timeouts"} <= names
    assert not any("version" in name or "shared" in name for name in names)
    assert {"bytes_currently_mapped"} <= {sample.labels["counter"] for sample in level.samples}
    counted = {sample.labels["kind"]: sample.value for sample in resources.samples}
    assert counted["publications"] >= 1
    assert counted["clients"] >= 1


def test_who_holds_the_control_stream_is_a_metric(shared_media_driver: aeron.MediaDriver, connect: Any) -> None:
    """From the second scrape on: a tethered subscriber that has not moved, with its client and process."""
    overrides = {"driver.control_stream_id": 61_980, "supervisor.aeron_dir": shared_media_driver.aeron_dir}
    config = SupervisorConfig.load(environ={}, overrides=overrides)
    channel, stream_id = config.driver.control_channel, config.driver.control_stream_id
    publisher, idle = connect(shared_media_driver), connect(shared_media_driver)
    subscription = idle.add_subscription(channel, stream_id)
    publication = publisher.add_publication(channel, stream_id, exclusive=True)
    wait_until(lambda: publication.offer(bytes(100)), "a message is in the log")
    exports = Exports(Observer(None, config), tuple)
    with exports.observer:
        assert "tensorpool_control_held_bytes" not in samples(exports)

        def held() -> dict[frozenset[tuple[str, str]], float]:
            return samples(exports).get("tensorpool_control_held_bytes", {})

        pid = ("pid", str(os.getpid()))  # which the media driver knows after the client's first heartbeat
        wait_until(lambda: any(pid in labels for labels in held()), "it is named")
        assert list(held().values()) == [publication.position]
        subscription.poll(lambda *_: None, 10)
        wait_until(lambda: not held(), "it has read on")


def test_the_view_is_served_as_json_and_answers_are_a_moment_old_at_most(exports: Exports, clock: ManualClock) -> None:
    """However many requests there are, the view is read ten times a second."""
    first = json.loads(exports.routes["/view"]().body)
    assert first["streams"][0]["stream_id"] == STREAM
    assert first["time_ns"] == 1_000 * S
    clock.advance(50_000_000)
    again = json.loads(exports.routes["/view"]().body)
    assert again == first
    clock.advance(51_000_000)
    later = json.loads(exports.routes["/view"]().body)
    assert later["time_ns"] == 1_000 * S + 101_000_000


def test_health_is_bad_without_a_media_driver_or_without_turns(exports: Exports, clock: ManualClock) -> None:
    """503 with the reason."""
    answer = exports.routes["/healthz"]()
    assert answer.status == 503
    assert "stands still" in json.loads(answer.body)["trouble"]
    exports.observer.do_work()
    answer = exports.routes["/healthz"]()
    assert answer.status == 503
    assert "no media driver is alive at" in json.loads(answer.body)["trouble"]
    assert exports.routes["/"]().status == 200


# --- the dashboard

FUNCTIONS = {"sum", "count", "max", "rate", "increase", "changes", "vector", "topk"}
WORDS = {"by", "or", "and", "on", "without"}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Every query about the supervisor's metrics; tests/bridge and tests/integration/test_alerts.py have the others."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            if not re.search("tensorpool_(bridge|recorder|space|driver)_", target["expr"]):
                yield panel["title"], target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"], ""
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"], ""


@pytest.mark.parametrize(("title", "expression", "legend"), list(expressions()), ids=lambda it: str(it)[:40])
def test_every_query_of_the_dashboard_is_about_metrics_and_labels_that_exist(
    title: str, expression: str, legend: str, exports: Exports, shared_media_driver: aeron.MediaDriver, connect: Any
) -> None:
    """A metric that is renamed fails here until the panel follows."""
    known = {name: {label for key in found for label, _ in key} for name, found in samples(exports).items()}
    known |= {"tensorpool_stream_bytes_per_second": set(LABELS), "tensorpool_stream_frame_age_seconds": set(LABELS)}
    known |= {"tensorpool_supervisor_given_up_total": set()}
    for family in aeron_metrics(connect(shared_media_driver).counters()):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    if match := re.fullmatch(r"label_values\((\w+), (\w+)\)", expression):
        assert match[2] in known[match[1]]
        return
    used: set[str] = set()
    bare = re.sub(r'"[^"]*"', '""', expression)
    groups = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", bare) for label in group.split(",")}
    for match in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{([^}]*)\})?", re.sub(r"\bby \([^)]*\)|\[[^]]*\]", " ", bare)):
        name = match[1]
        if name in FUNCTIONS or name in WORDS:
            continue
        assert name in known, f"{title}: there is no metric {name}"
        used.add(name)
        asked = {part.partition("=")[0].rstrip("!") for part in (match[3] or "").split(",") if part}
        assert asked <= known[name], f"{title}: {name} has no labels {asked - known[name]}"
    assert used, f"{title}: {expression} asks for nothing"
    for label in groups | set(re.findall(r"\{\{(\w+)\}\}", legend)):
        assert any(label in known[name] for name in used), f"{title}: nothing has the label {label}"


def test_the_values_that_the_dashboard_asks_for_exist(connect: Any, shared_media_driver: aeron.MediaDriver) -> None:
    """States and counters by name."""
    text = " ".join(expression for _, expression, _ in expressions())
    counters = {
        sample.labels["counter"]
        for family in aeron_metrics(connect(shared_media_driver).counters())
        for sample in family.samples
        if "counter" in sample.labels
    }
    for group in re.findall(r'counter=~"([^"]*)"', text):
        assert set(group.split("|")) <= counters
    for group in re.findall(r'state=~?"([^"]*)"', text):
        assert set(group.split("|")) <= {*StreamState, *ConsumerState}
    for kind in re.findall(r'kind="([^"]*)"', text):
        assert kind in set(ChangeKind)
