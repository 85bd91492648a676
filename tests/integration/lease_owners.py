# SPDX-License-Identifier: Apache-2.0
"""Three accounts and one driver: who is attached, who may end what, limits for each user, and the audit log.

Run by test_lease_owners.py as root below `unshare`, in the mounts and with the accounts of shared_group.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tensorpool as tp
from tests.integration.shared_group import ANN, BOB, EXAMPLE, PATIENCE_S, VOLUME, connected, prepare, report, start

LOG: Final = Path("/dev/shm/driver.log")
CAROL: Final = BOB  # the member who has no key of the driver's account
LIMITS: Final = ("policies.max_user_leases=2", "policies.shutdown_timeout_ms=100")


@contextlib.contextmanager
def driver(*settings: str) -> Iterator[None]:
    """Ann's driver, whose log is a file."""
    from tensorpool.cli.main import main

    def run() -> None:
        os.dup2(os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
        words = [word for setting in settings for word in ("--set", setting)]
        sys.argv[1:] = ["driver", "--config", str(EXAMPLE), "--log-format", "json", *words]
        main()

    LOG.touch()
    os.chown(LOG, ANN, ANN)
    pid = start(ANN, run)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def holding(uid: int, role: str) -> Iterator[int]:
    """A process of an account that attaches, under a command line of its own; its pid."""
    read_end, write_end = os.pipe()

    def run() -> None:
        os.set_inheritable(write_end, True)
        arguments = [sys.executable, "-m", "tests.integration.lease_owners", role, str(write_end)]
        os.execv(sys.executable, arguments)

    pid = start(uid, run)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read(1) == b"a"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def hold(role: str, fd: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with connected() as client:
        attached = client.producer(VOLUME, timeout=PATIENCE_S) if role == "produce" else client.consumer(VOLUME)
        with attached:
            os.write(fd, b"a")
            time.sleep(3600)


def leases() -> list[dict[str, Any]]:
    """`tensorpool leases --json`, once all of them are declared."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        rows: list[dict[str, Any]] = json.loads(tensorpool("leases", "--json").stdout or "[]")
        if (rows and all("pid" in row for row in rows)) or time.monotonic() > deadline_s:
            return rows
        time.sleep(0.05)


def tensorpool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorpool", *arguments, "--config", str(EXAMPLE)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def order(*arguments: str) -> list[Any]:
    done = tensorpool(*arguments)
    return [done.returncode, done.stdout + done.stderr]


def attach_too_many() -> str:
    """How often an account attaches until it is refused, and why."""
    with connected() as client, contextlib.ExitStack() as held:
        for count in range(5):
            try:
                held.enter_context(client.consumer(VOLUME, timeout=5))
            except tp.AttachRefused as refused:
                return f"{count}: {refused}"
    return "never"


def consume() -> str:
    with connected() as client, client.consumer(VOLUME, timeout=PATIENCE_S):
        return "attached"


def main() -> None:
    prepare(Path(sys.argv[1]), homes=True)
    with driver(*LIMITS), holding(BOB, "produce") as bob:
        report(0, "bob's pid", lambda: bob)
        with holding(ANN, "consume") as ann:
            report(0, "ann's pid", lambda: ann)
            report(CAROL, "a member looks", leases)
            report(CAROL, "a member revokes", lambda: order("leases", "revoke", "--stream", str(VOLUME)))
            os.chown("/dev/shm/home-bob", 0, 0)  # from here on without a key: the audit log names such a sender, too
            report(CAROL, "a member drains", lambda: order("drain"))
            report(CAROL, "still there", lambda: [row["lease_id"] for row in leases()])
            report(BOB, "bob attaches too often", attach_too_many)
            report(ANN, "ann attaches beside him", consume)
            report(ANN, "ann revokes", lambda: order("leases", "revoke", "--stream", str(VOLUME), "--reason", "end"))
    print(json.dumps({"what": "log", "found": [json.loads(line) for line in LOG.read_text().splitlines()]}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        hold(sys.argv[1], int(sys.argv[2]))
    else:
        main()
