# SPDX-License-Identifier: Apache-2.0
"""Five accounts, ten streams, a recorder with retention, a bridge, a supervisor and a console, and an operator at work.

Run by test_workstation.py as root below `unshare`: /dev/shm, the driver's own mount and the disk are small tmpfs.
The operator restarts and reloads the driver, replaces it by an earlier version and back, ends leases, restarts the
recorder, kills and stops programs of users, and fills /dev/shm and the disk, in an order that the seed decides. After
each act everybody who was not its victim goes on, and in the end everybody does. Prints one line of JSON: what each
found.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.integration.shared_group import reveal
from tests.support.old_version import old_python
from tests.support.processes import ROOT, wait_until

OPERATOR, GROUP = 64_000, 64_100
USERS: Final = {f"user{index}": 64_001 + index for index in range(5)}
STREAMS: Final = range(10_000, 10_010)  # two for each user
FAR: Final = 10_020  # what the bridge makes of the first one
PORTS: Final = {"driver": 9465, "recorder": 9468, "sender": 9471, "receiver": 9472, "console": 9470, "supervisor": 9464}
EXCHANGE: Final = "/mnt/exchange"  # a tmpfs for the driver alone: who fills /dev/shm harms nobody here
HOMES: Final = "/mnt/workstation/homes"  # where the driver's account keeps the key that signs its commands
OLD_PATH: Final = Path("/mnt/workstation/old")  # an earlier version of tensorpool
ACT_S: Final = 120.0  # until everybody goes on
HZ: Final = 50

# A user's program: it publishes on its own streams and reads those of others, and keeps books of both.
PROGRAM: Final = f"""
import collections, json, sys, threading, time
import numpy as np, tensorpool as tp

config, produced, consumed = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
is_over = threading.Event()
published, received = collections.Counter(), collections.Counter()
counted, late, faults, refusals = collections.Counter(), collections.Counter(), [], collections.Counter()

def patiently(run, *arguments):
    while not is_over.is_set():
        try:
            with tp.connect(config=config) as client:
                run(client, *arguments)
        except tp.TensorPoolError as error:
            refusals[type(error).__name__] += 1
            is_over.wait(0.5)

def publish(client, stream):
    with client.producer(stream, timeout=60) as producer:
        while not is_over.wait(1 / {HZ}):
            number = published[stream]
            frame = np.arange(number, number + 128, dtype=np.int64)
            frame[0] = stream
            if producer.publish(frame) is not None:
                published[stream] += 1

def read(client, stream, source):
    before = None
    with client.consumer(stream, timeout=60) as consumer:
        while not is_over.is_set():
            frame = consumer.poll(0.5)
            if frame is None:
                continue
            if before is not None and before[0] == frame.epoch:
                missing = frame.seq - before[1] - 1
                if missing != frame.dropped_before:
                    faults.append(f"{{stream}}: {{missing}} frames are missing, {{frame.dropped_before}} are counted")
            before = frame.epoch, frame.seq
            counted[stream] += frame.dropped_before
            try:
                array = frame.copy()
            except tp.FrameOverwritten:
                late[stream] += 1
                continue
            received[stream] += 1
            if array[0] != source or (np.diff(array[1:]) != 1).any():
                faults.append(f"{{stream}}: frame {{frame.seq}} of epoch {{frame.epoch}} has wrong bytes")

threads = [threading.Thread(target=patiently, args=(publish, stream)) for stream in produced]
threads += [threading.Thread(target=patiently, args=(read, *pair)) for pair in consumed]
for thread in threads:
    thread.start()
for line in sys.stdin:
    print(json.dumps({{"published": published, "received": received, "counted": counted, "late": late,
                      "refusals": refusals, "faults": faults[:20]}}), flush=True)
is_over.set()
for thread in threads:
    thread.join()
"""


class Program:
    """A process of an account."""

    def __init__(self, uid: int, log: Path, *words: str, python: str = sys.executable, path: str = str(ROOT)) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [python, *words],
            user=uid,
            group=GROUP,
            extra_groups=[GROUP],
            umask=0o077,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": path, "HOME": f"{HOMES}/{uid}"},
        )

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("report\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        assert line.startswith("{"), f"{self._log.name}: ended with {self.process.wait(5)}"
        return dict(json.loads(line))

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ask it to end: the exit code and what it printed meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=ACT_S)
        self._log.close()
        return self.process.returncode, output


class Workstation:
    """The services, the users, and what the operator may do to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.config = folder / "driver.toml"
        self.lake = folder / "disk" / "lake"
        self.has_extra = False
        self.users: dict[str, Program] = {}
        self.services: dict[str, Program] = {}
        self.closed: list[dict[str, Any]] = []  # reports of programs before they were killed
        self.recordings: list[dict[str, Any]] = []
        self.acts: dict[str, int] = {}

    def write_config(self) -> None:
        extra = '[streams.extra]\nstream_id = 10030\nprofile = "small"\n' if self.has_extra else ""
        streams = "".join(
            f'[streams.s{number}]\nstream_id = {number}\nprofile = "small"\n' for number in (*STREAMS, FAR)
        )
        self.config.write_text(
            f"""
            [driver]
            instance_id = "lab"
            aeron_dir = "{EXCHANGE}/aeron"
            [shm]
            base_dir = "{EXCHANGE}/shm"
            group = "lab"
            permissions_mode = "660"
            [policies]
            announce_period_ms = 500
            lease_keepalive_interval_ms = 500
            lease_expiry_grace_intervals = 8
            epoch_gc_on_startup = true
            epoch_gc_min_age_ns = 1000000000
            [profiles.small]
            header_nslots = 256
            payload_pools = [{{pool_id = 1, stride_bytes = 4096}}]
            {streams}
            {extra}
            """
        )
        self.config.chmod(0o644)

    def start_service(self, name: str, *words: str) -> None:
        metrics = [] if name == "supervisor" else ["--metrics", f"127.0.0.1:{PORTS[name]}"]
        arguments = ("-m", "tensorpool", *words, "--config", str(self.config), *metrics)
        if name in ("sender", "receiver"):
            arguments = ("-m", "tensorpool", *words, *metrics)
        self.services[name] = Program(OPERATOR, self.folder / f"{name}.log", *arguments)

    def start_driver(self) -> None:
        self.start_service("driver", "driver", "--log-level", "warning")
        process = self.services["driver"].process
        wait_until(lambda: health("driver") == 200 or process.poll() is not None, "the driver is well", timeout_s=ACT_S)
        assert process.poll() is None, f"the driver ended with {process.returncode}"

    def start_recorder(self) -> None:
        streams = [str(STREAMS[0]), str(STREAMS[3])]
        words = ("--to", str(self.lake), "--name", "r", "--direct", "--no-sync", "--json", "--retain-bytes", "4m")
        self.start_service("recorder", "record", *streams, *words, "--file-size", "1m")
        wait_until(lambda: health("recorder") == 200, "the recorder has started", timeout_s=ACT_S)

    def start_user(self, name: str) -> None:
        words = (str(self.config), json.dumps(self._streams_of(name)), json.dumps(self._read_by(name)))
        self.users[name] = Program(USERS[name], self.folder / f"{name}.log", "-c", PROGRAM, *words)

    def start(self) -> None:
        self.write_config()
        self.start_driver()
        self.start_service("supervisor", "supervisor", "--log-level", "error")
        self.start_service("console", "console", "--lake", str(self.lake))
        for name in USERS:
            self.start_user(name)
        path = self.folder / "bridge.toml"
        path.write_text(_bridge_file(self.config))
        path.chmod(0o644)
        for role in ("receiver", "sender"):
            words = ("bridge", "--config", str(path), "--set", f"bridge.role={role}", "--log-level", "error")
            self.start_service(role, *words, "--set", f"bridge.instance_id={role}")
        self.start_recorder()
        self.everybody_goes_on()

    def everybody_goes_on(self, but: str | None = None) -> None:
        """Every stream of every user who is not the victim is published and read on."""
        victims = {str(number) for number in self._streams_of(but)}
        before = {name: user.ask() for name, user in self.users.items() if name != but}

        def is_so() -> bool:
            time.sleep(0.2)
            for name, then in before.items():
                now = self.users[name].ask()
                wanted = [("published", str(number)) for number in self._streams_of(name)]
                wanted += [("received", number) for number in then["received"] if number not in victims | {str(FAR)}]
                if not all(now[kind].get(number, 0) > then[kind].get(number, 0) for kind, number in wanted):
                    return False
            return True

        wait_until(is_so, f"everybody but {but} goes on", timeout_s=ACT_S)

    def _streams_of(self, name: str | None) -> list[int]:
        if name is None:
            return []
        index = list(USERS).index(name)
        return [STREAMS[2 * index], STREAMS[2 * index + 1]]

    def _read_by(self, name: str) -> list[tuple[int, int]]:
        """The streams that a user reads, each with the one that its frames come from."""
        index = list(USERS).index(name)
        other = 2 * ((index + 1) % len(USERS))
        read = [(STREAMS[other], STREAMS[other]), (STREAMS[other + 1], STREAMS[other + 1])]
        return [*read, (FAR, STREAMS[0])] if index == 2 else read

    # --- what the operator does

    def restart_driver(self) -> None:
        self._end_driver()
        self.start_driver()

    def _end_driver(self) -> None:
        code, _ = self.services["driver"].end()
        assert code == 0, f"the driver ended with {code}"

    def upgrade_driver(self) -> None:
        """The driver is replaced by one of the earlier version, and that one by today's, under running programs."""
        self._end_driver()
        wait_until(self._start_old_driver, "the earlier version serves", timeout_s=ACT_S)
        self.everybody_goes_on()
        self.services["driver"].end()  # with any code: 0.2.0 does not always end by itself
        self.start_driver()

    def _start_old_driver(self) -> bool:
        """False: it ended before it served."""
        python, path = old_python(OLD_PATH)
        words = ("-m", "tensorpool", "driver", "--config", str(self.config), "--log-level", "warning")
        driver = Program(OPERATOR, self.folder / "driver.log", *words, python=python, path=path)
        self.services["driver"] = driver
        assert driver.process.stdout is not None
        if " serves " in driver.process.stdout.readline():
            return True
        print(f"the earlier version ended with {driver.end()[0]}", file=sys.stderr, flush=True)
        return False

    def revoke_leases(self) -> None:
        """The driver's account ends all leases of a user, which no member can; the user's program attaches again."""
        name, member = self.random.sample(list(USERS), 2)
        pid = self.users[name].process.pid
        wanted = [(stream, "PRODUCER") for stream in self._streams_of(name)]
        wanted += [(stream, "CONSUMER") for stream, _ in self._read_by(name)]

        def held() -> dict[int, dict[str, Any]]:
            return {lease["lease_id"]: lease for lease in self.leases() if lease.get("pid") == pid}

        def holds_all() -> bool:
            return sorted((lease["stream_id"], lease["role"]) for lease in held().values()) == sorted(wanted)

        wait_until(holds_all, f"the driver knows all leases of {name}", timeout_s=ACT_S)
        leases = held()
        code, _ = self.type(USERS[member], "leases", "revoke", str(min(leases)))
        assert code == 1, f"{member} ended a lease of {name}"
        refusals = self.users[name].ask()["refusals"]
        for lease_id, lease in leases.items():
            which = self.random.choice([[str(lease_id)], ["--client", str(lease["client_id"])]])
            code, output = self.type(OPERATOR, "leases", "revoke", *which, "--reason", "maintenance")
            assert (code, output.count("revoked ")) == (0, 1), f"leases revoke {which}: {output}"
            assert f"pid {pid}, user {name}" in output, output

        wait_until(holds_all, f"{name} holds leases again", timeout_s=ACT_S)
        assert not leases.keys() & held().keys(), f"leases of {name} were not ended"
        assert self.users[name].ask()["refusals"] == refusals, f"{name} did not attach again by itself"

    def leases(self) -> list[dict[str, Any]]:
        code, output = self.type(OPERATOR, "leases", "--json")
        assert code == 0
        return list(json.loads(output))

    def type(self, uid: int, *words: str) -> tuple[int, str]:
        """A command of an account: its exit code and what it printed."""
        arguments = ("-m", "tensorpool", *words, "--config", str(self.config), "--timeout", "60")
        return Program(uid, self.folder / "typed.log", *arguments).end(0)

    def reload_driver(self) -> None:
        self.has_extra = not self.has_extra
        self.write_config()
        reloads = driver_events("reloads")
        self.services["driver"].process.send_signal(signal.SIGHUP)
        wait_until(lambda: driver_events("reloads") > reloads, "the driver reloaded", timeout_s=ACT_S)

    def restart_recorder(self) -> None:
        wait_until(lambda: health("recorder") == 200, "the recorder is well", timeout_s=ACT_S)
        self._end_recorder()
        self.start_recorder()

    def _end_recorder(self) -> None:
        code, output = self.services.pop("recorder").end()
        assert code == 0, f"the recorder ended with {code}: {output[-500:]}"
        self.recordings.append(json.loads(output.splitlines()[-1]))

    def kill_user(self) -> None:
        name = self.random.choice(list(USERS))
        self.closed.append(self.users[name].ask())
        self.users[name].end(signal.SIGKILL)
        self.everybody_goes_on(but=name)
        self.start_user(name)

    def stop_user(self) -> None:
        name = self.random.choice(list(USERS))
        process = self.users[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            self.everybody_goes_on(but=name)
        finally:
            process.send_signal(signal.SIGCONT)

    def fill_memory(self) -> None:
        """Anybody can fill /dev/shm, and no member can write to the driver's own mount."""
        tried = Program(USERS["user1"], self.folder / "user1.log", "-c", f"open('{EXCHANGE}/filler', 'wb')")
        assert tried.end(0)[0] == 1
        with filled(Path("/dev/shm")):
            self.everybody_goes_on()
            name = self.random.choice(list(USERS))  # who comes meanwhile gets memory too
            self.closed.append(self.users[name].ask())
            self.users[name].end(signal.SIGKILL)
            self.start_user(name)
            self.everybody_goes_on()

    def fill_disk(self) -> None:
        with filled(self.lake.parent):
            self.everybody_goes_on()

    def work(self, seconds: float) -> None:
        """Each act once, in any order, and then at random until the time is over."""
        acts: list[Callable[[], None]] = [
            self.restart_driver,
            self.upgrade_driver,
            self.revoke_leases,
            self.reload_driver,
            self.restart_recorder,
            self.kill_user,
            self.stop_user,
            self.fill_memory,
            self.fill_disk,
        ]
        first = self.random.sample(acts, len(acts))
        end_s = time.monotonic() + seconds
        while first or time.monotonic() < end_s:
            act = first.pop() if first else self.random.choice(acts)
            print(f"{act.__name__} {seconds - end_s + time.monotonic():.1f}", file=sys.stderr, flush=True)
            act()
            self.acts[act.__name__] = self.acts.get(act.__name__, 0) + 1
            self.everybody_goes_on()

    def end(self) -> dict[str, Any]:
        """End all in order, and say what was found."""
        wait_until(lambda: health("recorder") == 200, "the recorder is well", timeout_s=ACT_S)
        far = [report["received"].get(str(FAR), 0) for report in (user.ask() for user in self.users.values())]
        healths = {name: health(name) for name in PORTS}
        failures = driver_events("failures")
        self._end_recorder()
        reports = self.closed + [user.ask() for user in self.users.values()]
        codes: dict[str, int] = {}
        for name, user in self.users.items():
            user.process.communicate(timeout=ACT_S)  # the end of its input
            codes[name] = user.process.returncode
        for name in ("sender", "receiver", "console", "supervisor", "driver"):
            codes[name] = self.services[name].end()[0]
        verify = [sys.executable, "-m", "tensorpool", "lake", "verify", str(self.lake)]
        verified = subprocess.run(verify, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
        return {
            "acts": self.acts,
            "reports": reports,
            "codes": codes,
            "healths": healths,
            "failures": failures,
            "far": max(far),
            "recordings": self.recordings,
            "verified": verified.stdout + verified.stderr,
            "left": sorted(str(path) for path in Path(EXCHANGE).rglob("*") if path.is_file()),
        }

    def close(self) -> None:
        for program in (*self.users.values(), *self.services.values()):
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()


@contextlib.contextmanager
def filled(folder: Path) -> Any:
    """Leave no room in a mount, for a moment."""
    filler = folder / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    try:
        yield
    finally:
        filler.unlink()


def health(service: str) -> int:
    """What /healthz answers; 0: nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[service]}/healthz", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def driver_events(kind: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS['driver']}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(rf'^tensorpool_driver_events_total\{{kind="{kind}"\}} (\S+)', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _bridge_file(driver: Path) -> str:
    channels = [f"aeron:udp?endpoint=127.0.0.1:{port}" for port in (24421, 24422, 24423)]
    return f"""
        [bridge]
        instance_id = "bridge"
        driver_config = "{driver}"
        payload_channel = "{channels[0]}"
        payload_stream_id = 50000
        control_channel = "{channels[1]}"
        control_stream_id = 1000
        metadata_channel = "{channels[2]}"
        metadata_stream_id = 1300
        [[mappings]]
        source_stream_id = {STREAMS[0]}
        dest_stream_id = {FAR}
    """


def prepare(folder: Path, old: Path) -> None:
    """Mounts, accounts and folders that only this process and its children see."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755,size=64m", "tmpfs", str(folder.parent)], check=True)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", "/dev/shm"], check=True)
    (folder / "disk").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=0755,uid={OPERATOR},size=48m", "tmpfs", str(folder / "disk")], check=True
    )
    exchange = Path(EXCHANGE)
    exchange.mkdir()
    options = f"mode=0755,uid={OPERATOR},gid={GROUP},size=256m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", EXCHANGE], check=True)
    names = {"root": 0, "operator": OPERATOR, **USERS}
    accounts = "".join(f"{name}:x:{uid}:{uid}::{HOMES}/{uid}:/bin/sh\n" for name, uid in names.items())
    for uid in names.values():
        home = Path(HOMES, str(uid))
        home.mkdir(parents=True)
        os.chown(home, uid, uid)
    for name, text in (("passwd", accounts), ("group", f"root:x:0:\nlab:x:{GROUP}:{','.join(names)}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
        subprocess.run(["mount", "--bind", str(folder / name), f"/etc/{name}"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/var/tmp"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    reveal(Path(sys.base_prefix), folder / "python")
    OLD_PATH.mkdir()
    subprocess.run(["mount", "--bind", str(old), str(OLD_PATH)], check=True)


def main() -> None:
    folder, seconds, seed = Path("/mnt/workstation"), float(sys.argv[1]), int(sys.argv[2])
    prepare(folder, Path(sys.argv[3]))
    workstation = Workstation(folder, seed)
    try:
        workstation.start()
        workstation.work(seconds)
        print(json.dumps(workstation.end()), flush=True)
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
        raise
    finally:
        workstation.close()


if __name__ == "__main__":
    main()
