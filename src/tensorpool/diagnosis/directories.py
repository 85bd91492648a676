# SPDX-License-Identifier: Apache-2.0
"""May this process do with the directories and region files what it has to? Wire §15.10, §15.21a.3, §15.21a.6."""

from __future__ import annotations

import os
import stat
from typing import Final

from tensorpool.diagnosis.check_result import CheckResult, fail, ok, warn
from tensorpool.driver.config import DriverConfig
from tensorpool.file_access import group_name, user_name
from tensorpool.shm.epochs import scan_epochs
from tensorpool.shm.namespace import find_namespaces, namespace_path
from tensorpool.shm.permission import explain_denial

CHECK: Final = "directories"
REGIONS: Final = "region files"


def check_directories(config: DriverConfig) -> list[CheckResult]:
    """The base directory and this user's namespace in it: who owns them, and what we may do there."""
    namespace = namespace_path(config.shm.base_dir, config.shm.namespace)
    user_dir = os.path.dirname(namespace)
    base = os.path.dirname(user_dir)
    findings = []
    for path in (base, user_dir, namespace):
        finding = _check_directory(path)
        if finding is None:
            parent = os.path.dirname(path)
            findings.append(_check_absent(path, parent))
            break
        findings.append(finding)
    return findings


def check_region_files(config: DriverConfig) -> list[CheckResult]:
    """The files of every epoch below our base directories: may we read them?"""
    readable, denied, private = 0, [], []
    for base in config.shm.allowed_base_dirs:
        private += _unreadable_namespaces(base)
        for namespace in find_namespaces(base):
            try:
                found = scan_epochs(namespace)
            except OSError:
                continue
            for epoch in found:
                header = os.path.join(epoch.path, "header.ring")
                if not os.path.exists(header):
                    continue
                if os.access(header, os.R_OK, effective_ids=True):
                    readable += 1
                else:
                    denied.append(header)
    findings = [
        fail(REGIONS, explain_denial(path, writable=False), "as it says; then start this process anew")
        for path in denied[:3]
    ]
    findings += [
        warn(REGIONS, explain_denial(path, writable=False), "none is needed unless you want that user's streams")
        for path in private
    ]
    return findings or [ok(REGIONS, f"{readable} epochs, all readable" if readable else "there are none")]


def _unreadable_namespaces(base: str) -> list[str]:
    try:
        with os.scandir(base) as entries:
            users = [entry.path for entry in entries if entry.name.startswith("tensorpool-")]
    except OSError:
        return []
    return [path for path in users if not os.access(path, os.R_OK | os.X_OK, effective_ids=True)]


def _check_directory(path: str) -> CheckResult | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except PermissionError:
        return fail(CHECK, explain_denial(path, writable=False), "as it says; then start this process anew")
    shown = _describe(path, found)
    if stat.S_ISLNK(found.st_mode):
        return fail(CHECK, f"{path} is a symbolic link", f"rm {path}    (links are not followed there)")
    if not stat.S_ISDIR(found.st_mode):
        return fail(CHECK, f"{path} is no directory", f"mv {path} {path}.moved")
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        return fail(CHECK, explain_denial(path, writable=False), "as it says; then start this process anew")
    if found.st_uid not in (os.geteuid(), 0):
        remedy = f"sudo rm -r {path}    (its owner could replace our files; a driver refuses it)"
        return warn(CHECK, f"{shown}: another user's", remedy)
    may = "may write" if os.access(path, os.W_OK, effective_ids=True) else "may only read"
    return ok(CHECK, f"{shown}; {user_name(os.geteuid())} {may}")


def _check_absent(path: str, parent: str) -> CheckResult:
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return ok(CHECK, f"{path} does not exist yet; a driver makes it")
    return fail(
        CHECK, explain_denial(parent, writable=True), f"sudo install -d -m 1777 {path}, or another shm.base_dir"
    )


def _describe(path: str, found: os.stat_result) -> str:
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    return f"{path} {mode} {user_name(found.st_uid)}:{group_name(found.st_gid)}"
