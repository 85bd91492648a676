# SPDX-License-Identifier: Apache-2.0
"""Namespaces: paths, modes, planted directories, and one driver at a time."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import threading
from pathlib import Path

import pytest

from tensorpool.errors import ConfigError
from tensorpool.shm import find_namespaces, namespace_path
from tensorpool.shm.namespace import LOCK_NAME, NamespaceLock, make_namespace, user_component
from tests.shm.by_hand import NOBODY, folder, umask
from tests.support.processes import Process, run_script


def mode_of(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


def test_the_path_is_base_user_namespace(shm_dir: Path) -> None:
    """The base is resolved, the user is the effective one."""
    (shm_dir / "link").symlink_to(shm_dir)
    assert namespace_path(f"{shm_dir}/link/base", "lab.1") == f"{shm_dir}/base/tensorpool-root/lab.1"


def test_the_environment_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """USER and LOGNAME may be set to anything."""
    monkeypatch.setenv("USER", "../../etc")
    monkeypatch.setenv("LOGNAME", "mallory")
    assert namespace_path("/dev/shm/x") == "/dev/shm/x/tensorpool-root/default"


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".", "", "ann lee", "ännchen", "x" * 201])
def test_an_account_name_that_is_no_file_name_becomes_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name traverses the tree."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((name, "", uid, 0, "", "", "")))
    assert user_component(1234) == "1234"


@pytest.mark.parametrize("namespace", ["", ".", "..", "a/b", "../x", "a b", "ä", "x" * 201])
def test_a_namespace_is_one_plain_component(namespace: str) -> None:
    """Anything else is refused under the key that holds it."""
    with pytest.raises(ConfigError, match=r"shm\.namespace"):
        namespace_path("/dev/shm/x", namespace)


@pytest.mark.parametrize("base", ["relative", "/with space", "/with|bar", "/with?mark", "/ünicode"])
def test_a_base_must_fit_into_a_uri(base: str) -> None:
    """What could not be announced is refused at the start."""
    with pytest.raises(ConfigError, match=r"shm\.base_dir"):
        namespace_path(base)


@pytest.mark.parametrize(("file_mode", "expected"), [(0o660, "2750"), (0o600, "700"), (0o640, "2750")])
@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_directories_get_exact_modes_whatever_the_umask(
    shm_dir: Path, file_mode: int, expected: str, mask: int
) -> None:
    """The base is open to all users and sticky, the rest suits the files."""
    base = shm_dir / "base"
    with umask(mask):
        path = Path(make_namespace(str(base), "n", file_mode=file_mode))
    assert [mode_of(base), mode_of(path.parent), mode_of(path)] == ["1777", expected, expected]


def test_a_changed_mode_reaches_directories_of_an_earlier_run(shm_dir: Path) -> None:
    """From private to shared and back, without touching the base."""
    shm_dir.chmod(0o750)
    for file_mode, expected in ((0o600, "700"), (0o660, "2750"), (0o600, "700")):
        path = Path(make_namespace(str(shm_dir), file_mode=file_mode))
        assert [mode_of(shm_dir), mode_of(path.parent), mode_of(path)] == ["750", expected, expected]


# Runs as the user nobody after making what root should not trust, or what root prepared.
AS_NOBODY = """
import os, sys
from tensorpool.errors import ConfigError
from tensorpool.shm.namespace import make_namespace
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for base in sys.argv[1:]:
    try:
        print(make_namespace(base))
    except ConfigError as refused:
        print(refused)
"""


def test_users_share_a_base_and_nothing_else(shm_dir: Path) -> None:
    """Where root ran first another user still gets a tree; where it may not write, the error says why."""
    shm_dir.chmod(0o755)
    make_namespace(str(shm_dir / "base"))
    (shm_dir / "locked").mkdir(mode=0o755)
    code, output = run_script(AS_NOBODY, str(shm_dir / "base"), str(shm_dir / "locked"))
    made, refused = output.splitlines()
    assert code == 0
    assert made == f"{shm_dir}/base/tensorpool-nobody/default"
    assert Path(made).stat().st_uid == NOBODY
    assert f"shm.base_dir = '{shm_dir}/locked' is not usable; accepted: a directory below which this user" in refused
    assert f"this process may not read and write {shm_dir}/locked: it runs as nobody (uid 65534)" in refused
    assert "found owner root:root, mode 0755" in refused


@pytest.mark.parametrize("plant", ["tensorpool-root", "tensorpool-root/default"])
def test_a_directory_that_another_user_made_is_refused(shm_dir: Path, plant: str) -> None:
    """Its owner could replace our files under our feet."""
    (shm_dir / plant).mkdir(parents=True)
    os.chown(shm_dir / plant, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"{plant}: it belongs to nobody, who could replace our files"):
        make_namespace(str(shm_dir))


@pytest.mark.parametrize("plant", ["tensorpool-root", "tensorpool-root/default"])
def test_a_planted_link_is_not_followed(shm_dir: Path, plant: str) -> None:
    """A link in the place of a directory is refused, and what it leads to stays as it was."""
    (shm_dir / plant).parent.mkdir(exist_ok=True)
    (shm_dir / "elsewhere").mkdir(mode=0o700)
    (shm_dir / plant).symlink_to(shm_dir / "elsewhere")
    with pytest.raises(ConfigError, match=f"{plant}: Not a directory"):
        make_namespace(str(shm_dir))
    assert mode_of(shm_dir / "elsewhere") == "700"
    assert list((shm_dir / "elsewhere").iterdir()) == []


def test_all_namespaces_below_a_base_are_found(shm_dir: Path) -> None:
    """Those of every user; files, links and strangers are passed over."""
    for name in ("tensorpool-ann/a", "tensorpool-ann/b", "tensorpool-bob/default", "other/x"):
        (shm_dir / name).mkdir(parents=True)
    (shm_dir / "tensorpool-file").touch()
    (shm_dir / "tensorpool-link").symlink_to(shm_dir / "other")
    names = ("tensorpool-ann/a", "tensorpool-ann/b", "tensorpool-bob/default")
    assert find_namespaces(str(shm_dir)) == [f"{shm_dir}/{name}" for name in names]
    assert find_namespaces(str(shm_dir / "missing")) == []


# --- the lock


def test_a_second_driver_is_refused_and_learns_which_process_holds_the_namespace(shm_dir: Path) -> None:
    """The error names the pid and the file; after the release the namespace is free and the file gone."""
    with folder(shm_dir) as fd:
        lock = NamespaceLock(fd, str(shm_dir))
        with pytest.raises(ConfigError) as caught:
            NamespaceLock(fd, str(shm_dir))
        assert caught.value.key == "shm.namespace"
        assert f"pid {os.getpid()} holds {shm_dir}/{LOCK_NAME}" in str(caught.value)
        lock.release()
        assert list(shm_dir.iterdir()) == []
        NamespaceLock(fd, str(shm_dir)).release()


HOLDER = """
import os, sys, time
from tensorpool.shm.namespace import NamespaceLock
lock = NamespaceLock(os.open(sys.argv[1], os.O_RDONLY), sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_the_lock_dies_with_its_process(shm_dir: Path) -> None:
    """SIGKILL leaves the file, which then blocks no driver."""
    with Process("-c", HOLDER, str(shm_dir)) as holder, folder(shm_dir) as fd:
        assert holder.read_line() == "held"
        with pytest.raises(ConfigError, match=f"pid {holder.pid} holds"):
            NamespaceLock(fd, str(shm_dir))
        holder.send(signal.SIGKILL)
        holder.finish()
        assert (shm_dir / LOCK_NAME).read_text() == f"{holder.pid}\n"
        (shm_dir / LOCK_NAME).write_text("12345678901234567890\n")
        lock = NamespaceLock(fd, str(shm_dir))
        assert (shm_dir / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        lock.release()


def test_a_lock_is_a_lock_while_others_take_and_release_it(shm_dir: Path) -> None:
    """Release removes the file: no process ends up holding one that is no longer at its path."""
    holders, most, taken = 0, 0, 0
    counting = threading.Lock()

    def compete() -> None:
        nonlocal holders, most, taken
        with folder(shm_dir) as fd:
            for _ in range(300):
                try:
                    lock = NamespaceLock(fd, str(shm_dir))
                except ConfigError:
                    continue
                with counting:
                    holders, taken = holders + 1, taken + 1
                    most = max(most, holders)
                with counting:
                    holders -= 1
                lock.release()

    threads = [threading.Thread(target=compete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 100
    assert list(shm_dir.iterdir()) == []


def test_a_lock_that_was_removed_is_released_without_taking_the_next_ones(shm_dir: Path) -> None:
    """`rm -rf` under a running driver: its release does not remove the lock of its successor."""
    with folder(shm_dir) as fd:
        first = NamespaceLock(fd, str(shm_dir))
        (shm_dir / LOCK_NAME).unlink()
        second = NamespaceLock(fd, str(shm_dir))
        first.release()
        assert (shm_dir / LOCK_NAME).exists()
        second.release()
        assert not (shm_dir / LOCK_NAME).exists()


def test_the_lock_is_not_inherited(shm_dir: Path) -> None:
    """A child that outlives the driver must not keep the namespace."""
    with folder(shm_dir) as fd:
        lock = NamespaceLock(fd, str(shm_dir))
        assert not os.get_inheritable(lock._fd)
        lock.release()
