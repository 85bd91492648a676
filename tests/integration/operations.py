# SPDX-License-Identifier: Apache-2.0
"""Does what docs/operations.md says, as root in a mount namespace with accounts, /etc, /srv and /dev/shm of its own.

Run by test_operations.py below `unshare`. systemd does not run here: `Units` carries out `systemctl`. It starts what a
unit's ExecStart says as its User, and speaks systemd's part of the notify protocol. Prints one line of JSON for each
command: the line, whether it ended as it should, and its output.
"""

from __future__ import annotations

import configparser
import grp
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.integration.shared_group import reveal
from tests.support.pages import blocks
from tests.support.processes import ROOT

PAGE: Final = "docs/operations.md"
BY_HAND: Final = "tests/integration/test_operations.py runs it"
COMMAND_S: Final = 120


def prepare(folder: Path) -> None:
    """Copies of what the page changes; only this process and its children see them."""
    subprocess.run(["cp", "--archive", "/etc", str(folder / "etc")], check=True)
    shutil.rmtree(folder / "etc/tensorpool", ignore_errors=True)
    for name, size in (("/dev/shm", "1g"), ("/srv", "200m"), ("/mnt", "8m"), ("/run", "8m"), ("/var/lib", "8m")):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=1777,size={size}", "tmpfs", name], check=True)
    subprocess.run(["mount", "--bind", str(folder / "etc"), "/etc"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    reveal(Path(sys.base_prefix), folder / "python")


class Units:
    """What systemd would do with the units in /etc/systemd/system."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self.messages: dict[str, list[str]] = {}

    def obey(self, words: list[str]) -> None:
        """A command line of systemctl. Raises AssertionError where the unit does not do its part."""
        names = [word for word in words[1:] if not word.startswith("-")]
        match words[0]:
            case "daemon-reload":
                return
            case "enable":
                assert "--now" in words
                for name in names:
                    self._start(name)
            case "disable":
                for name in names:
                    self._stop(name)
            case "restart":
                for name in names:
                    self._stop(name)
                    self._start(name)
            case "reload":
                for name in names:
                    process, _ = self._running[name]
                    process.send_signal(signal.SIGHUP)
                    self._wait_for(name, "RELOADING=1")
                    self._wait_for(name, "READY=1")
            case other:
                raise AssertionError(f"systemctl {other}")

    def close(self) -> None:
        for name in list(self._running)[::-1]:
            self._stop(name)

    def _start(self, name: str) -> None:
        unit = configparser.RawConfigParser()
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(f"/etc/systemd/system/{name}.service")
        service: Any = unit["Service"]
        user, group = pwd.getpwnam(service["User"]), grp.getgrnam(service["Group"])
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(f"\0tp-operations-{name}-{len(self.messages)}")
        listener.settimeout(COMMAND_S)
        process = subprocess.Popen(
            shlex.split(service["ExecStart"]),
            user=user.pw_uid,
            group=group.gr_gid,
            extra_groups=[],
            umask=0o022,
            cwd="/",
            start_new_session=True,
            stdout=open(f"/run/{name}.log", "ab"),  # noqa: SIM115 - the unit's own
            stderr=subprocess.STDOUT,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": user.pw_dir,
                "USER": user.pw_name,
                "PYTHONPATH": str(ROOT),
                "NOTIFY_SOCKET": "@" + listener.getsockname()[1:].decode(),
                "WATCHDOG_USEC": str(int(service["WatchdogSec"]) * 1_000_000),
            },
        )
        self._running[name] = process, listener
        self._wait_for(name, "READY=1")

    def _wait_for(self, name: str, word: str) -> None:
        process, listener = self._running[name]
        seen = self.messages.setdefault(name, [])
        while True:
            try:
                message = listener.recv(4096).decode()
            except TimeoutError:
                log = Path(f"/run/{name}.log").read_text()
                raise AssertionError(f"{name}: no {word}; {seen}, code {process.poll()}: {log}") from None
            seen.append(message)
            if message.startswith(word):
                return

    def _stop(self, name: str) -> None:
        process, listener = self._running[name]
        process.terminate()
        self._wait_for(name, "STOPPING=1")
        code = process.wait(COMMAND_S)
        assert code == 0, f"{name} ended with {code}: {Path(f'/run/{name}.log').read_text()}"
        listener.close()
        del self._running[name]


class Operator:
    """Types what the page prints."""

    def __init__(self) -> None:
        self.units = Units()
        self._environment = {
            "PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": "/root",
        }
        self._background: list[subprocess.Popen[bytes]] = []

    def read(self) -> None:
        for block in blocks(PAGE):
            saved = re.match(r"# (/etc/\S+)\n", block.text)
            if saved:
                Path(saved[1]).write_text(block.text)
            elif block.language == "sh" and BY_HAND in (block.reason or ""):
                for line in block.text.splitlines():
                    self.type(line, block.codes)

    def type(self, line: str, codes: tuple[int, ...]) -> None:
        if line.startswith("systemctl "):
            self.units.obey(shlex.split(line)[1:])
            code, output = 0, ""
        elif line.endswith(" &"):
            output_path = f"/run/background-{len(self._background)}.log"
            words = ["setsid", "sh", "-c", f"exec {line.removesuffix(' &')}"]
            with open(output_path, "wb") as output_file:
                self._background.append(
                    subprocess.Popen(words, stdout=output_file, stderr=subprocess.STDOUT, env=self._environment)
                )
            code, output = 0, ""
        else:
            done = subprocess.run(
                ["sh", "-c", line],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                env=self._environment,
            )
            code, output = done.returncode, done.stdout
        print(json.dumps({"line": line, "is_good": code in codes, "output": output}), flush=True)

    def close(self) -> None:
        for process in self._background:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        self.units.close()


def main() -> None:
    prepare(Path(sys.argv[1]))
    operator = Operator()
    try:
        operator.read()
    finally:
        operator.close()
    print(json.dumps({"line": "units", "is_good": True, "output": operator.units.messages}), flush=True)
    files = [str(path) for folder in ("/dev/shm", "/mnt") for path in Path(folder).rglob("*") if path.is_file()]
    print(json.dumps({"line": "left", "is_good": True, "output": files}), flush=True)


if __name__ == "__main__":
    main()
