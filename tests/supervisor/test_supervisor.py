# SPDX-License-Identifier: Apache-2.0
"""The supervisor as a whole: what it tells consumers of ours, what it serves, and that it can be commanded."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.control import Commander
from tensorpool.control.errors import CommandRejected
from tensorpool.errors import LocalProtocolError
from tensorpool.settings import Secret
from tensorpool.supervisor.config import RuleConfig, SupervisorConfig, SupervisorSection
from tensorpool.supervisor.snapshot import Change, ConsumerState
from tensorpool.supervisor.supervisor import Supervisor
from tensorpool.wire.control import Mode
from tests.support.processes import wait_until

PROFILE = {"header_nslots": 64, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
TOKEN = "s3cret"
TAG = "service:supervisor:desk"


@pytest.fixture(scope="module")
def pool() -> Iterator[tp.Local]:
    settings = {
        "profiles.default": PROFILE,
        "control.command_timeout_ms": 60_000,
        "policies.announce_period_ms": 500,
        "policies.shutdown_token": TOKEN,
    }
    with tp.local(overrides=settings) as pool:
        yield pool


@pytest.fixture
def client(pool: tp.Local) -> Iterator[tp.Client]:
    with pool.connect() as client:
        yield client


def config_of(pool: tp.Local, *rules: RuleConfig, **section: Any) -> SupervisorConfig:
    config = SupervisorConfig.of(pool.config)
    chosen = SupervisorSection(**{"instance_id": "desk", "http": "127.0.0.1:0", "rules": rules} | section)
    return msgspec.structs.replace(config, supervisor=chosen)


def get(supervisor: Supervisor, path: str) -> tuple[int, bytes]:
    assert supervisor.http_address is not None
    with contextlib.closing(http.client.HTTPConnection(supervisor.http_address, timeout=30)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def lag_behind(producer: tp.Producer, frames: int = 40) -> None:
    for _ in range(frames):
        producer.publish(np.zeros(16))


def test_a_consumer_that_lags_is_limited_and_released_when_it_does_well(pool: tp.Local, client: tp.Client) -> None:
    """Ours obeys; the view and the history show both."""
    rule = RuleConfig(stream="desk/limited", when_lag_over=20, for_ms=0, release_after_ms=200)
    changes: list[Change] = []
    with (
        Supervisor(config_of(pool, rule), aeron_dir=pool.aeron_dir, on_change=lambda it, _: changes.append(it)) as desk,
        client.producer("desk/limited", create=True) as producer,
        client.consumer(producer.stream_id, max_rate_hz=1000) as consumer,
    ):
        producer.wait_for_consumers()
        lag_behind(producer)
        wait_until(lambda: consumer.mode is Mode.RATE_LIMITED, "its mode is RATE_LIMITED")

        def is_released() -> bool:
            while consumer.poll() is not None:
                pass
            producer.publish(np.zeros(16))
            return consumer.mode is Mode.STREAM

        wait_until(is_released, "it does well and is let go again")
        wait_until(lambda: sum("policy" in str(it.kind) for it in changes) == 2, "both decisions are in the history")
        assert (desk.agent.policy.overrides, desk.agent.policy.released) == (1, 1)
        status, body = get(desk, "/metrics")
        assert status == 200
        assert b"tensorpool_supervisor_overrides_total 1.0" in body
        assert b'tensorpool_aeron_total{counter="bytes_sent"}' in body
    words = [it.text for it in changes if "policy" in str(it.kind)]
    assert words[0].startswith(f"consumer {consumer.consumer_id} of desk/limited ({producer.stream_id}): ")
    assert "over 20: set to RATE_LIMITED" in words[0]
    assert "does well again: STREAM" in words[1]


def test_a_consumer_can_be_sent_elsewhere(pool: tp.Local, client: tp.Client) -> None:
    """It stops using shared memory, and knows the fallback."""
    rule = RuleConfig(stream="desk/elsewhere", when_lag_over=20, for_ms=0, mode="STREAM", fallback_uri="bridge://b1")
    with (
        Supervisor(config_of(pool, rule, http=""), aeron_dir=pool.aeron_dir) as desk,
        client.producer("desk/elsewhere", create=True) as producer,
        client.consumer(producer.stream_id) as consumer,
    ):
        assert desk.http_address is None
        producer.wait_for_consumers()
        lag_behind(producer)
        wait_until(lambda: consumer.fallback_uri == "bridge://b1", "it was sent elsewhere")

        def state() -> ConsumerState | None:
            found = [it for it in desk.observer.snapshot().consumers if it.consumer_id == consumer.consumer_id]
            return found[0].state if found else None

        wait_until(lambda: state() is ConsumerState.REDIRECTED, "the view shows it")


def test_it_serves_its_view_and_is_a_service(pool: tp.Local, client: tp.Client) -> None:
    """/view, /healthz, ping, status, view; the driver and it itself are in the view."""
    with (
        Supervisor(config_of(pool), aeron_dir=pool.aeron_dir) as desk,
        client.producer("desk/served", create=True) as producer,
    ):
        wait_until(lambda: get(desk, "/healthz") == (200, b'{"status":"ok","trouble":null}'), "it is well")

        def view() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(get(desk, "/view")[1])
            return found

        wait_until(lambda: any(it["name"] == "desk/served" for it in view()["streams"]), "the stream is served")
        tags = {f"service:driver:{pool.config.driver.instance_id}", TAG}
        wait_until(lambda: {it["tag"] for it in view()["services"]} == tags, "both services are")
        with contextlib.closing(aeron.connect(pool.aeron_dir)) as transport:
            commander = Commander(transport, pool.config.control)
            assert commander.send(TAG, "ping", timeout=60).value == "pong"
            figures = commander.send(TAG, "view", timeout=60).json
            assert figures["streams"] >= 1
            assert figures["stream_states"]
            status = commander.send(TAG, "status", timeout=60).json
            assert (status["state"], status["overrides"]) == ("running", 0)
            assert commander.send(TAG, "drain", timeout=60).value == "draining"
        wait_until(lambda: not desk.is_running, "it ended in order")
        assert producer.is_active


def test_without_a_token_no_driver_is_asked_to_end(pool: tp.Local) -> None:
    """The command is refused, and so is the call."""
    config = config_of(pool)
    policies = msgspec.structs.replace(config.policies, announce_period_ms=500, shutdown_token=Secret(""))
    config = msgspec.structs.replace(config, policies=policies)
    with Supervisor(config, aeron_dir=pool.aeron_dir) as desk:
        with pytest.raises(LocalProtocolError, match="shutdown_token is not configured"):
            desk.shut_down_driver()
        with contextlib.closing(aeron.connect(pool.aeron_dir)) as transport:
            commander = Commander(transport, pool.config.control)
            with pytest.raises(CommandRejected, match="shutdown_token is not configured"):
                commander.send(TAG, "shutdown-driver", timeout=60)


def test_the_driver_ends_when_it_is_asked_with_its_token() -> None:
    """By a command to the supervisor; the view tells the end."""
    settings = {
        "profiles.default": PROFILE,
        "control.command_timeout_ms": 60_000,
        "policies.announce_period_ms": 500,
        "policies.shutdown_timeout_ms": 100,
        "policies.shutdown_token": TOKEN,
    }
    with (
        tp.local(overrides=settings) as pool,
        Supervisor(config_of(pool, http=""), aeron_dir=pool.aeron_dir) as desk,
        contextlib.closing(aeron.connect(pool.aeron_dir)) as transport,
    ):
        commander = Commander(transport, pool.config.control)

        def is_recorded() -> bool:
            return any("the driver ended, ADMIN" in it.text for it in desk.observer.snapshot().changes)

        def is_ended() -> bool:
            """Asked again: a driver passes over what may have been in the log before it was."""
            if pool.is_running and not is_recorded():
                assert commander.send(TAG, "shutdown-driver", "ADMIN", timeout=60).value == "asked"
            return not pool.is_running

        wait_until(is_ended, "the driver ended")
        wait_until(is_recorded, "the history has it")


def test_it_waits_for_a_media_driver(shm_dir: Path) -> None:
    """Started first, it is unwell until there is one."""
    aeron_dir = str(shm_dir / "aeron")
    config = SupervisorConfig.load(environ={}, overrides={"supervisor.http": "127.0.0.1:0"})
    with Supervisor(config, aeron_dir=aeron_dir) as desk:
        status, body = get(desk, "/healthz")
        assert status == 503
        assert b"no media driver is alive at" in body
        with aeron.MediaDriver(aeron_dir):
            wait_until(lambda: get(desk, "/healthz")[0] == 200, "it found one")
