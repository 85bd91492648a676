# SPDX-License-Identifier: Apache-2.0
"""The supervisor's settings: defaults, a driver's own file, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorpool.driver import DriverConfig
from tensorpool.errors import ConfigError
from tensorpool.supervisor.config import SupervisorConfig

FILE = """
[supervisor]
instance_id = "lab1"
http = "[::1]:9000"
stale_periods = 3

[[supervisor.rules]]
stream = "camera/*"
consumer_ids = [42]
when_lag_over = 100
release_after_ms = 10_000

[[supervisor.rules]]
when_drops_per_s_over = 5
mode = "STREAM"
fallback_uri = "bridge://b1"

[control]
status_stream_id = 1501

[driver]
control_stream_id = 2000

[policies]
announce_period_ms = 500
shutdown_token = "s3cret"
"""


def load(text: str = "", tmp_path: Path | None = None, **overrides: Any) -> SupervisorConfig:
    path = None
    if tmp_path is not None:
        path = tmp_path / "supervisor.toml"
        path.write_text(text)
    return SupervisorConfig.load(path, environ={}, overrides=overrides)


def test_everything_has_a_default() -> None:
    """Loopback, four periods, no rules."""
    config = load()
    assert config.supervisor.http == "127.0.0.1:9464"
    assert config.stale_ns == 4_000_000_000
    assert config.supervisor.rules == ()
    assert (config.driver.control_stream_id, config.control.status_stream_id) == (1000, 1401)


def test_a_file_is_read_and_the_token_stays_hidden(tmp_path: Path) -> None:
    """Rules in their order, the driver's keys beside ours."""
    config = load(FILE, tmp_path)
    assert [rule.stream for rule in config.supervisor.rules] == ["camera/*", "*"]
    assert config.supervisor.rules[0].consumer_ids == (42,)
    assert config.supervisor.rules[1].fallback_uri == "bridge://b1"
    assert config.stale_ns == 1_500_000_000
    dumped = config.dump()
    assert dumped["policies.shutdown_token"] == "<hidden>"
    assert dumped["supervisor.rules[0].when_lag_over"] == 100


def test_a_drivers_own_file_will_do(tmp_path: Path) -> None:
    """Its endpoints and its announce period are what the supervisor needs to know."""
    text = """
    [driver]
    qos_stream_id = 1250
    [policies]
    announce_period_ms = 200
    [profiles.small]
    header_nslots = 8
    payload_pools = [{pool_id = 1, stride_bytes = 64}]
    [streams.front]
    stream_id = 5
    [discovery]
    max_results = 10

    [client]
    attach_timeout_ms = 9000
    """
    config = load(text, tmp_path)
    assert (config.driver.qos_stream_id, config.stale_ns) == (1250, 800_000_000)
    path = tmp_path / "supervisor.toml"
    observed = SupervisorConfig.of(DriverConfig.load(path, environ={}), forget_ms=5_000)
    assert (observed.driver.qos_stream_id, observed.stale_ns) == (1250, 800_000_000)
    assert observed.supervisor.forget_ms == 5_000


def test_the_environment_goes_over_the_file(tmp_path: Path) -> None:
    """As for every service."""
    path = tmp_path / "supervisor.toml"
    path.write_text(FILE)
    environ = {"SUPERVISOR_HTTP": "127.0.0.1:1", "POLICIES_ANNOUNCE_PERIOD_MS": "100"}
    config = SupervisorConfig.load(path, environ=environ)
    assert (config.supervisor.http, config.stale_ns) == ("127.0.0.1:1", 300_000_000)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("supervisor.http", "9464", "HOST:PORT"),
        ("supervisor.http", "localhost:", "port from 0 to 65535"),
        ("supervisor.http", "localhost:65536", "port from 0 to 65535"),
        ("supervisor.http", "::1:9464", "HOST:PORT"),
        ("supervisor.http", "0.0.0.0:9464", "supervisor.http_allow_remote = true"),
        ("supervisor.http", "example.org:80", "a loopback address"),
        ("supervisor.stale_periods", 2, "from 3 to 5"),
        ("supervisor.stale_periods", 6, "from 3 to 5"),
        ("supervisor.max_streams", 0, "from 1"),
        ("supervisor.instance_id", "", "visible ASCII"),
        ("supervisor.htpp", "127.0.0.1:1", "supervisor.http"),
        ("control.status_stream_id", 1400, "another id"),
        ("driver.control_channel", "aeron:tcp", "Aeron URI"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(key: str, value: object, words: str) -> None:
    """With what is accepted."""
    settings: dict[str, Any] = {key: value}
    with pytest.raises(ConfigError) as refused:
        load(**settings)
    assert refused.value.key == key
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "key", "words"),
    [
        ("", "when_lag_over", "a rule needs one of them"),
        ('when_lag_over = 5\nstream = ""', "stream", '"*" for all'),
        ('when_lag_over = 5\nmode = "STREAM"', "mode", "a rule has to change something"),
        ('when_lag_over = 5\nmode = "FAST"', "mode", "RATE_LIMITED or STREAM"),
        ('when_lag_over = 5\nfallback_uri = "http://x"', "fallback_uri", "bridge://<id>"),
        ('when_lag_over = 5\nfallback_uri = "bridge://"', "fallback_uri", "bridge://<id>"),
        ('when_lag_over = 5\nfallback_uri = "aeron:udp"', "fallback_uri", "endpoint=host:port"),
        ('when_lag_over = 5\nfallback_uri = "bridge://x"\nrelease_after_ms = 1', "release_after_ms", "reads elsewhere"),
        ("when_lag_over = 5\ncooldown_ms = 0", "cooldown_ms", "from 1"),
        ("when_lag_over = 5\nconsumer_ids = [0]", "consumer_ids[0]", "from 1"),
        ("when_lag_over = 5\nrate_hz = 5", "rate_hz", "one of stream"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(tmp_path: Path, rule: str, key: str, words: str) -> None:
    """By its number and key. E26: no message carries a rate, so no rule has one."""
    with pytest.raises(ConfigError) as refused:
        load(f"[[supervisor.rules]]\n{rule}", tmp_path)
    assert refused.value.key == f"supervisor.rules[0].{key}"
    assert words in str(refused.value)


def test_remote_http_has_to_be_asked_for() -> None:
    """Then it is served."""
    settings: dict[str, Any] = {"supervisor.http": "0.0.0.0:9464", "supervisor.http_allow_remote": True}
    config = load(**settings)
    assert config.supervisor.http == "0.0.0.0:9464"
