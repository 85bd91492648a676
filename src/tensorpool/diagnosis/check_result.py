# SPDX-License-Identifier: Apache-2.0
"""The result of a check: its level, what was found, and what to type to fix it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """FAIL: something does not work. WARN: it works, but needs attention."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. Without a remedy only where there is nothing to fix."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> CheckResult:
    return CheckResult(check=check, level=Level.OK, found=found)


def warn(check: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, level=Level.WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, level=Level.FAIL, found=found, remedy=remedy)


def size(size_bytes: int) -> str:
    """As people read it."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{round(size_bytes / scale, 1):g} {unit}"
    return f"{size_bytes} B"
