# SPDX-License-Identifier: Apache-2.0
"""Commands from a page to real services: which pass, which have to be confirmed, which are refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

import tensorpool as tp
from tensorpool import logs
from tensorpool.console.services import Command, needs_confirmation, offered
from tests.console.page import Answer, Site
from tests.support.processes import wait_until


@pytest.fixture
def tag(site: Site, pool: tp.Local) -> str:
    """Of the driver's service, once the state has it."""

    def found() -> list[str]:
        services = site.get("/api/state").json.get("services", ())
        return [service["tag"] for service in services if service["service"] == "driver"]

    wait_until(found, "the driver's service is in the state")
    return found()[0]


def send(site: Site, tag: str, command: str, **more: Any) -> Answer:
    return site.post(f"/api/services/{quote(tag, safe='')}/commands", {"command": command, **more})


def test_a_question_is_answered_without_confirmation(site: Site, tag: str, pool: tp.Local) -> None:
    """Status as JSON, ping, the log level."""
    answer = send(site, tag, "status")
    assert answer.status == 200, answer.body
    assert answer.json["result"]["service"] == "driver"
    assert answer.json["result"]["instance"] == pool.config.driver.instance_id
    assert send(site, tag, "ping").json == {"result": "pong"}
    assert send(site, tag, "log-level").json == {"result": logs.level()}


def test_what_changes_something_has_to_be_confirmed(site: Site, tag: str) -> None:
    """Without it nothing is sent; with it the level is another."""
    before = logs.level()
    try:
        wanted = "error" if before != "error" else "warning"
        refused = send(site, tag, "log-level", arguments={"level": wanted})
        assert (refused.status, "confirmed" in refused.json["error"]) == (409, True)
        assert logs.level() == before
        done = send(site, tag, "log-level", arguments={"level": wanted}, confirmed=True)
        assert (done.status, done.json) == (200, {"result": wanted})
        assert logs.level() == wanted
    finally:
        logs.set_level(before)
    assert send(site, tag, "drain").status == 409
    assert send(site, tag, "status").json["result"]["state"] == "running"


def test_what_a_service_does_not_offer_is_refused_in_its_words(site: Site, tag: str) -> None:
    """Unknown commands and values by the service; unknown services by the console."""
    answer = send(site, tag, "pause", confirmed=True)
    assert (answer.status, "no command of it" in answer.json["error"]) == (409, True)
    answer = send(site, tag, "log-level", arguments={"level": "loud"}, confirmed=True)
    assert (answer.status, "log-level takes" in answer.json["error"]) == (409, True)
    answer = send(site, tag, "log-level", arguments={"a": "info", "b": "info"}, confirmed=True)
    assert (answer.status, "one value" in answer.json["error"]) == (409, True)
    assert send(site, "service:driver:nobody", "status").status == 404
    assert send(site, "../../etc", "status").status == 404
    assert send(site, tag, "é", confirmed=True).status == 409
    for body in (
        {},
        {"command": 5},
        {"command": "status", "confirmed": "yes"},
        {"command": "x", "arguments": {"a": []}},
    ):
        assert site.post(f"/api/services/{quote(tag, safe='')}/commands", body).status == 400


def test_only_questions_need_no_confirmation() -> None:
    """Whatever is not known to be one is taken for a change."""
    assert not any(needs_confirmation(Command(name)) for name in ("ping", "status", "view", "log-level"))
    assert all(
        needs_confirmation(Command(name)) for name in ("drain", "pause", "resume", "shutdown-driver", "provision", "x")
    )
    assert needs_confirmation(Command("log-level", {"level": "info"}))
    assert "pause" in offered("recorder")
    assert "pause" not in offered("driver")
