# SPDX-License-Identifier: Apache-2.0
"""How services log: as JSON, logfmt or for the journal, one line for each event whatever is in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, wait_until, whole_lines

WRITE = """
import os, sys
from tensorpool import logs
if sys.argv[1] == "journal":
    found = os.fstat(2)
    os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
else:
    logs.choose_format(sys.argv[1])
logs.configure("info")
log = logs.get_logger("audit", kind="audit")
log.info("lease_attached", stream="a b", command='x "y" level=error\\n\\x1b[31m', empty=None)
try:
    raise ValueError("two\\nlines")
except ValueError as error:
    log.error("turn_failed", exc_info=error)
"""
COMMAND = r'command="x \"y\" level=error\n\x1b[31m"'


def written(format: str, **environment: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([sys.executable, "-c", WRITE, format], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_json_is_an_object_for_each_event() -> None:
    """Also where no format is chosen, and stderr is neither a terminal nor the journal."""
    for chosen in ("json", "auto"):
        info, error = (json.loads(line) for line in written(chosen, JOURNAL_STREAM="1:1"))
        assert (info["event"], info["kind"], info["command"]) == (
            "lease_attached",
            "audit",
            'x "y" level=error\n\x1b[31m',
        )
        assert "ValueError: two" in error["exception"]


def test_logfmt_is_a_line_for_each_event() -> None:
    """The event first; nothing that a terminal obeys."""
    info, error = written("logfmt")
    assert re.fullmatch(
        r'timestamp=\S+ level=info event=lease_attached kind=audit stream="a b" ' + re.escape(COMMAND) + " empty=", info
    )
    assert error.partition(" ")[2].startswith("level=error event=turn_failed kind=audit exception=")


@pytest.mark.parametrize("chosen", ["journald", "journal"])
def test_the_journal_gets_the_level_and_no_time(chosen: str) -> None:
    """As systemd reads it; found out by JOURNAL_STREAM. A level inside of a field is none."""
    info, error = written(chosen)
    assert info == f'<6>event=lease_attached kind=audit stream="a b" {COMMAND} empty='
    assert error.startswith("<3>event=turn_failed kind=audit exception=")


def test_a_service_takes_the_format_as_an_option_or_from_the_environment(shm_dir: Path) -> None:
    """`tensorpool driver --log-format`."""
    for number, (option, variable) in enumerate(((("--log-format", "logfmt"), "json"), ((), "logfmt"))):
        log = shm_dir / f"log{number}"
        options = ["--aeron-dir", str(shm_dir / "aeron"), "--set", f"shm.base_dir={shm_dir / 'shm'}"]
        options += ["--set", "policies.shutdown_timeout_ms=1"]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tensorpool", "driver", *options, *option],
                stderr=stderr,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(ROOT), "TENSORPOOL_LOG_FORMAT": variable},
            )
            try:
                wait_until(
                    lambda log=log: any("event=driver_started" in it for it in whole_lines(log)), "it has started"
                )
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
