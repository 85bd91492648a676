# SPDX-License-Identifier: Apache-2.0
"""The audit log: bounded in rate, with a count of what was left out."""

from __future__ import annotations

import logging

import pytest

from tensorpool.audit_log import BURST, LINES_PER_S, AuditLog

SECOND_NS = 1_000_000_000


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tensorpool.audit")
    return caplog


def events(lines: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(" ")[0] for record in lines.records]


def test_a_line_says_that_it_is_audit(lines: pytest.LogCaptureFixture) -> None:
    """With the fields of the log and its own; what is not known is left out."""
    AuditLog(service="driver").line(0, "lease_expired", lease_id=17, user=None)
    assert [record.getMessage() for record in lines.records] == [
        "lease_expired kind='audit' service='driver' lease_id=17"
    ]


def test_a_flood_is_counted_and_the_rest_goes_on(lines: pytest.LogCaptureFixture) -> None:
    """A burst, then so many lines a second; the number of the others comes before the next line."""
    log = AuditLog()
    for _ in range(BURST + 500):
        log.line(0, "attach_refused")
    assert events(lines) == ["attach_refused"] * BURST
    lines.clear()
    for turn in range(1, 11):
        log.flush(turn * SECOND_NS // 10)
    log.line(SECOND_NS, "lease_expired")
    assert events(lines) == ["audit_lines_left_out", "lease_expired"]
    assert "count=500" in lines.records[0].getMessage()
    lines.clear()
    for millisecond in range(10_000):
        log.line(SECOND_NS + millisecond * 1_000_000, "attach_refused")
    written = events(lines)
    assert len(written) <= 10 * LINES_PER_S + LINES_PER_S
    assert written.count("audit_lines_left_out") >= 1


def test_the_end_of_a_log_says_what_is_missing(lines: pytest.LogCaptureFixture) -> None:
    """Also where there is no room for a line."""
    log = AuditLog()
    for _ in range(BURST + 3):
        log.line(0, "attach_refused")
    log.flush(0, is_last=True)
    assert "audit_lines_left_out" in events(lines)
