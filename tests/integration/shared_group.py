# SPDX-License-Identifier: Apache-2.0
"""Four accounts and examples/driver/shared_group.toml as it is, in a mount namespace with accounts of its own.

Run by test_shared_group.py as root below `unshare`: /dev/shm, /etc/passwd and /etc/group are the scenario's. Every
account is a forked process. What each one finds is printed, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import tensorpool as tp

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples/driver/shared_group.toml"
GROUP: Final = 64_100
ANN, BOB, EVE = 64_001, 64_002, 64_004  # who runs the driver, a member, another user
MEMBERS: Final = (ANN, BOB)
VOLUME: Final = 10_000  # the stream of the example
PATIENCE_S: Final = 30.0


def prepare(folder: Path, *, homes: bool = False) -> None:
    """Mounts and accounts that only this process and its children see; without `homes` no account can keep a key."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=2g", "tmpfs", "/dev/shm"], check=True)
    users = {"root": 0, "ann": ANN, "bob": BOB, "eve": EVE}
    places = {name: f"/dev/shm/home-{name}" if homes else "/" for name in users}
    accounts = "".join(f"{name}:x:{uid}:{uid}::{places[name]}:/bin/sh\n" for name, uid in users.items())
    for name, uid in users.items() if homes else ():
        os.mkdir(places[name], 0o700)
        os.chown(places[name], uid, uid)
    for name, text in (("passwd", accounts), ("group", f"root:x:0:\nimaging:x:{GROUP}:ann,bob\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
        subprocess.run(["mount", "--bind", str(folder / name), f"/etc/{name}"], check=True)
    reveal(Path(sys.base_prefix), folder / "python")


def reveal(path: Path, aside: Path) -> None:
    """Have all accounts find an interpreter that lies where only root may search, such as in /root."""
    hidden = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
    if hidden:
        aside.mkdir()
        subprocess.run(["mount", "--bind", str(path), str(aside)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(hidden[0])], check=True)
        path.mkdir(parents=True)
        subprocess.run(["mount", "--bind", str(aside), str(path)], check=True)


def start(uid: int, act: Callable[[], object]) -> int:
    """Run `act` in a process of that account, with a umask that shares nothing."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.umask(0o077)
        os.setgroups([GROUP] if uid in MEMBERS else [])
        os.setgid(uid)
        os.setuid(uid)
        act()
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def report(uid: int, what: str, act: Callable[[], Any]) -> None:
    """Have an account do something to its end; print what it returned."""
    read_end, write_end = os.pipe()

    def run() -> None:
        os.write(write_end, json.dumps(act()).encode())

    pid = start(uid, run)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    print(json.dumps({"what": what, "found": json.loads(found) if found else None}), flush=True)


@contextlib.contextmanager
def driver(*settings: str) -> Iterator[None]:
    """`tensorpool driver --config shared_group.toml`, run by ann."""
    from tensorpool.cli.main import main

    def run() -> None:
        words = [word for setting in settings for word in ("--set", setting)]
        sys.argv[1:] = ["driver", "--config", str(EXAMPLE), "--log-level", "error", *words]
        main()

    pid = start(ANN, run)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"what": "end", "found": os.waitstatus_to_exitcode(status)}), flush=True)


def connected() -> tp.Client:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return tp.connect(config=EXAMPLE)
        except tp.TensorPoolError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def producing(uid: int) -> Iterator[None]:
    """An account publishes one array, and again and again, on the configured stream."""

    def run() -> None:
        with connected() as client, client.producer(VOLUME, timeout=PATIENCE_S) as producer:
            while True:
                producer.publish(np.arange(6, dtype=np.uint16))
                time.sleep(0.02)

    pid = start(uid, run)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def read() -> list[int]:
    with connected() as client, client.consumer(VOLUME, timeout=PATIENCE_S) as consumer:
        frame = consumer.poll(PATIENCE_S)
        assert frame is not None
        values: list[int] = frame.copy().tolist()
        return values


def produce() -> str:
    """Why an account that may not write regions cannot be a producer; the driver may take its time before that."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with connected() as client, client.producer(VOLUME, timeout=2):
                return "produces"
        except tp.RegionRejected as error:
            return str(error)
        except tp.TensorPoolError:
            if time.monotonic() > deadline_s:
                raise


def connect() -> str:
    try:
        tp.connect(config=EXAMPLE).close()
        return "connects"
    except tp.TensorPoolError as error:
        return f"{type(error).__name__}: {error}"


def files() -> list[str]:
    """Every region and every file of the media driver, as root sees them."""
    return sorted(str(path) for folder in ("imaging", "imaging-aeron") for path in Path("/dev/shm", folder).rglob("*"))


def replace(path: str) -> None:
    """Put a file of one's own in the place of another."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete_on_close=False) as own:
        os.rename(own.name, path)


def attack(paths: list[str]) -> dict[str, list[str]]:
    """What succeeds of what an account has no business to do, by kind; the files are named."""
    attempts: dict[str, Callable[[str], object]] = {
        "list": os.listdir,
        "read": lambda path: os.close(os.open(path, os.O_RDONLY)),
        "write": lambda path: os.close(os.open(path, os.O_RDWR)),
        "create": lambda path: os.mkdir(f"{path}/evil"),
        "rename": lambda path: os.rename(path, f"{path}.evil"),
        "link": lambda path: os.link(path, f"{path}.evil"),
        "replace": replace,
        "chmod": lambda path: os.chmod(path, 0o777),
        "remove": lambda path: os.rmdir(path) if os.path.isdir(path) else os.unlink(path),
    }
    done: dict[str, list[str]] = {}
    for kind, attempt in attempts.items():
        for path in paths:
            with contextlib.suppress(OSError):
                attempt(path)
                done.setdefault(kind, []).append(path)
    return done


def truncated(paths: list[str]) -> list[str]:
    """Which of the files an account can cut short. To their own length: the driver goes on."""
    done = []
    for path in paths:
        with contextlib.suppress(OSError):
            os.truncate(path, os.stat(path).st_size)
            done.append(path)
    return done


def modes(paths: list[str]) -> dict[str, list[str]]:
    """Owner, group and mode, and what has them. A file that is just being written is looked at again."""
    until_s = time.monotonic() + 20
    while True:
        found: dict[str, list[str]] = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                found.setdefault(f"{status.st_uid}:{status.st_gid} {status.st_mode & 0o7777:o}", []).append(path)
        is_settled = not any(key.startswith(f"{ANN}:{ANN} ") for key in found)
        if is_settled or time.monotonic() > until_s:
            return found
        time.sleep(0.05)


def main() -> None:
    prepare(Path(sys.argv[1]))
    with driver():
        with producing(BOB):
            report(ANN, "ann reads bob's frames", read)
            report(BOB, "bob reads his own", read)
            paths = files()
            report(0, "modes", lambda: modes(paths))
            report(EVE, "eve connects", connect)
            report(EVE, "eve attacks", lambda: attack(paths))
            report(EVE, "eve truncates", lambda: truncated(paths))
            report(BOB, "bob attacks", lambda: attack(paths))
            report(BOB, "bob reads again", read)
        with producing(ANN):
            report(BOB, "bob reads ann's frames", read)
    with driver("shm.permissions_mode=640", "profiles.volume.header_nslots=4", "policies.shutdown_timeout_ms=100"):
        with producing(ANN):
            report(BOB, "bob reads read-only regions", read)
            paths = [path for path in files() if path.endswith((".ring", ".pool"))]
            report(BOB, "bob attacks read-only regions", lambda: attack(paths))
            report(BOB, "bob truncates read-only regions", lambda: truncated(paths))
        report(BOB, "bob produces", produce)


if __name__ == "__main__":
    main()
