# SPDX-License-Identifier: Apache-2.0
"""Accounts of one driver: who is attached, who may end what, limits for each user, and an audit log of all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_shared_group import run_accounts


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each account found, once for all tests of the module."""
    return run_accounts(Path(__file__).with_name("lease_owners.py"), tmp_path_factory.mktemp("owners"))


def test_a_member_sees_who_is_attached(found: dict[str, Any]) -> None:
    """Accounts as the driver's host has them, not as anybody says."""
    rows = {row["role"]: row for row in found["a member looks"]}
    assert {role: (row["user"], row["pid"], row["source"]) for role, row in rows.items()} == {
        "PRODUCER": ("bob", found["bob's pid"], "seen"),
        "CONSUMER": ("ann", found["ann's pid"], "seen"),
    }
    assert " -m tests.integration.lease_owners produce " in rows["PRODUCER"]["command"]
    assert rows["PRODUCER"]["program"] == "tests.integration.lease_owners"


def test_a_member_may_look_and_end_nothing(found: dict[str, Any]) -> None:
    """Revoke and drain are for the account that runs the driver."""
    for what in ("a member revokes", "a member drains"):
        code, output = found[what]
        assert (code, "not authorised" in output) == (1, True), output
    assert found["still there"] == sorted(row["lease_id"] for row in found["a member looks"])


def test_the_operator_ends_every_lease_of_a_stream(found: dict[str, Any]) -> None:
    """And reads whose they were."""
    code, output = found["ann revokes"]
    assert code == 0
    assert f"pid {found["bob's pid"]}, user bob" in output
    assert f"pid {found["ann's pid"]}, user ann" in output


def test_a_user_at_its_limit_stops_no_other(found: dict[str, Any]) -> None:
    """One lease more beside the producer's, then the refusal names the limit and what bob holds; ann attaches."""
    text = found["bob attaches too often"]
    assert text.startswith("1: ")
    assert "user bob holds 2 leases, and policies.max_user_leases is 2: " in text
    assert f"producer of stream 10000 by pid {found["bob's pid"]}" in text
    assert found["ann attaches beside him"] == "attached"


def test_the_audit_log_has_it_all(found: dict[str, Any]) -> None:
    """One line each, with account and process; the driver's secrets and queries of clients are not in it."""
    audit = [line for line in found["log"] if line.get("kind") == "audit"]
    by_event: dict[str, list[dict[str, Any]]] = {}
    for line in audit:
        by_event.setdefault(line["event"], []).append(line)
    assert {"lease_attached", "lease_revoked", "lease_detached", "attach_refused", "epoch_created", "command"} <= set(
        by_event
    )
    first = next(line for line in by_event["lease_attached"] if line.get("user") == "bob")
    assert (first["user"], first["pid"], first["stream"], first["role"]) == (
        "bob",
        found["bob's pid"],
        "volume",
        "PRODUCER",
    )
    (revoked,) = (line for line in by_event["lease_revoked"] if line["role"] == "PRODUCER")
    assert (revoked["user"], revoked["reason"], revoked["identity"]) == ("bob", "end", "seen")
    assert "policies.max_user_leases" in by_event["attach_refused"][0]["reason"]
    refused = {(line["key"], line["user"]) for line in by_event["command_refused"]}
    assert refused == {("revoke", "bob"), ("drain", "bob")}
    assert [(line["key"], line["user"]) for line in by_event["command"]] == [("revoke", "ann")]
    assert not {"query", "identify", "leases"} & {line.get("key", line["event"]) for line in audit}
