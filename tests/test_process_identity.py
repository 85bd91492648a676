# SPDX-License-Identifier: Apache-2.0
"""Identities of processes: one counts as ended only where that can be seen."""

from __future__ import annotations

import signal
import sys
from typing import Any

import msgspec
import pytest

from tensorpool.process_identity import MAX_PID, ProcessIdentity, process_stat
from tests.support.processes import Process, run_script, wait_until

DECLARE = """
import sys
import msgspec
from tensorpool.process_identity import ProcessIdentity
print(msgspec.json.encode(ProcessIdentity.own()).decode(), flush=True)
"""
SLEEPER = DECLARE + "sys.stdin.read()"
LEADER_ENDS = """
import ctypes, platform, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit: of this thread alone
"""
OUTER_PROC = """
import subprocess, sys
import msgspec
from tensorpool.process_identity import ProcessIdentity
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
identity = msgspec.json.decode(child.stdout.readline(), type=ProcessIdentity)
found = [identity.has_ended()]
child.kill()
child.wait()
print(identity.pid == child.pid, *found, identity.has_ended())
"""


def own() -> ProcessIdentity:
    identity = ProcessIdentity.own()
    assert identity is not None
    return identity


def declared(process: Process) -> ProcessIdentity:
    return msgspec.json.decode(process.read_line(), type=ProcessIdentity)


def free_pid() -> int:
    """One that no process has."""
    with Process("-c", "") as process:
        process.finish()
        return process.pid


def test_a_killed_process_has_ended_before_and_after_it_is_reaped() -> None:
    """Not before; a stopped one has not."""
    with Process("-c", SLEEPER) as process:
        identity = declared(process)
        assert identity.pid == process.pid
        assert not identity.has_ended()
        process.send(signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T", "it is stopped")
        assert not identity.has_ended()
        process.send(signal.SIGKILL)
        wait_until(identity.has_ended, "the zombie has ended")
        assert state_of(process.pid) == "Z"
        process.finish()
    assert identity.has_ended()


def state_of(pid: int) -> str:
    stat = process_stat(pid)
    assert stat is not None
    return stat.state


def test_a_process_with_the_same_number_is_another_one() -> None:
    """It started at another time."""
    assert msgspec.structs.replace(own(), start_ticks=own().start_ticks - 1).has_ended()
    assert not own().has_ended()


def test_a_process_whose_first_thread_has_ended_has_not() -> None:
    """The kernel shows it as a zombie; the others run on."""
    with Process("-c", DECLARE + LEADER_ENDS) as process:
        identity = declared(process)
        wait_until(lambda: state_of(process.pid) == "Z", "the first thread has ended")
        assert not identity.has_ended()
        process.send(signal.SIGKILL)
        wait_until(identity.has_ended, "all threads have ended")


@pytest.mark.parametrize(
    "elsewhere", [{"boot_id": "another"}, {"pid_namespace": 1}, {"time_namespace": 1}], ids=lambda it: next(iter(it))
)
def test_a_process_that_cannot_be_seen_from_here_has_not_ended(elsewhere: dict[str, Any]) -> None:
    """Another run of the kernel, another namespace: the number means another process there."""
    gone = msgspec.structs.replace(own(), pid=free_pid())
    assert gone.has_ended()
    assert not msgspec.structs.replace(gone, **elsewhere).has_ended()


def test_under_a_proc_of_an_outer_namespace_only_a_free_number_has_ended() -> None:
    """/proc shows another process under the number: what it says does not count."""
    again = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    unshared = ["unshare", "--pid", "--fork", sys.executable, "-c", OUTER_PROC, SLEEPER]
    assert run_script(again, *unshared) == (0, "True False True\n")


@pytest.mark.parametrize("pid", [0, -1, MAX_PID + 1])
def test_a_declared_number_is_one_of_a_process(pid: int) -> None:
    """0 and negative numbers address groups."""
    text = msgspec.json.encode({**msgspec.to_builtins(own()), "pid": pid})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ProcessIdentity)


def test_without_a_readable_proc_nothing_is_declared_and_nothing_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In doubt a process runs."""
    gone = msgspec.structs.replace(own(), pid=free_pid())

    def refuse(*_: object, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    assert ProcessIdentity.own() is None
    assert not gone.has_ended()
