# SPDX-License-Identifier: Apache-2.0
"""Containment: which announced paths are opened, and that nothing outside ever is, whatever is swapped."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorpool.errors import ConfigError, RegionRejected
from tensorpool.shm import AllowedBases, Check, containment
from tensorpool.wire.region_uri import RegionUri
from tests.shm.by_hand import mounted, open_files
from tests.support.processes import run_script


@pytest.fixture
def inside(shm_dir: Path) -> Path:
    """A file of 1 KiB below the allowed base."""
    path = shm_dir / "base" / "sub" / "header.ring"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"i" * 1024)
    return path


@pytest.fixture
def outside(shm_dir: Path) -> Path:
    """A file of 1 KiB that no consumer may open."""
    path = shm_dir / "outside" / "header.ring"
    path.parent.mkdir()
    path.write_bytes(b"o" * 1024)
    return path


@pytest.fixture
def bases(shm_dir: Path) -> AllowedBases:
    (shm_dir / "base").mkdir(exist_ok=True)
    return AllowedBases([shm_dir / "base"])


def first_byte(path: Path, bases: AllowedBases, *, size_bytes: int = 1024, **uri: bool) -> bytes:
    fd = containment.open_region(RegionUri(str(path), **uri), bases, size_bytes)
    try:
        return os.pread(fd, 1, 0)
    finally:
        os.close(fd)


def refusal(path: Path, bases: AllowedBases, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(RegionRejected) as caught:
        first_byte(path, bases, **arguments)
    assert caught.value.uri.startswith(f"shm:file?path={path}")
    return caught.value.check, caught.value.detail


def test_a_file_below_the_base_is_opened(inside: Path, bases: AllowedBases) -> None:
    """The plain case: a regular file of the right size inside the base."""
    assert first_byte(inside, bases) == b"i"


def test_the_descriptor_is_not_inherited_and_opens_as_asked(inside: Path, bases: AllowedBases) -> None:
    """Close-on-exec always, read-only unless writing was asked for."""
    uri = RegionUri(str(inside))
    for writable, mode in ((False, os.O_RDONLY), (True, os.O_RDWR)):
        fd = containment.open_region(uri, bases, 1024, writable=writable)
        try:
            assert not os.get_inheritable(fd)
            assert os.stat(f"/proc/self/fd/{fd}").st_ino == inside.stat().st_ino
            flags = next(line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if "flags" in line)
            assert int(flags.split()[1], 8) & os.O_ACCMODE == mode
        finally:
            os.close(fd)


@pytest.mark.parametrize("path", ["{base}/sub/../sub/header.ring", "{base}//sub/./header.ring"])
def test_paths_are_judged_by_where_they_lead(path: str, inside: Path, bases: AllowedBases, shm_dir: Path) -> None:
    """Detours inside the base are fine."""
    assert first_byte(Path(path.format(base=shm_dir / "base")), bases) == b"i"


def test_dot_dot_out_of_the_base_is_rejected(outside: Path, bases: AllowedBases, shm_dir: Path) -> None:
    """A path that starts inside and leads outside is outside."""
    path = f"{shm_dir}/base/../outside/header.ring"
    with pytest.raises(RegionRejected) as caught:
        containment.open_region(RegionUri(path), bases, 1024)
    assert caught.value.check == Check.CONTAINMENT
    assert f"{outside} is not inside {shm_dir}/base; add its directory to allowed_base_dirs" in str(caught.value)


def test_a_neighbour_with_the_same_prefix_is_outside(shm_dir: Path, bases: AllowedBases) -> None:
    """/base-evil is not below /base."""
    evil = shm_dir / "base-evil" / "header.ring"
    evil.parent.mkdir()
    evil.write_bytes(bytes(1024))
    assert refusal(evil, bases)[0] == Check.CONTAINMENT


def test_the_base_itself_is_not_below_itself(shm_dir: Path, bases: AllowedBases) -> None:
    """Only what lies below counts."""
    assert not bases.contains(str(shm_dir / "base"))
    assert bases.contains(str(shm_dir / "base" / "x"))
    assert AllowedBases(["/"]).contains("/x")


def test_any_of_several_bases_will_do(inside: Path, outside: Path, shm_dir: Path) -> None:
    """allowed_base_dirs is a list."""
    both = AllowedBases([shm_dir / "base", shm_dir / "outside"])
    assert (first_byte(inside, both), first_byte(outside, both)) == (b"i", b"o")


def test_a_base_that_is_a_link_counts_as_what_it_led_to_at_the_start(
    inside: Path, outside: Path, shm_dir: Path
) -> None:
    """Bases are resolved once: changing the link later opens nothing."""
    link = shm_dir / "link"
    link.symlink_to(shm_dir / "base")
    bases = AllowedBases([link])
    assert first_byte(inside, bases) == b"i"
    assert first_byte(link / "sub" / "header.ring", bases) == b"i"
    link.unlink()
    link.symlink_to(shm_dir / "outside")
    assert refusal(link / "header.ring", bases)[0] == Check.CONTAINMENT
    assert first_byte(inside, bases) == b"i"


def test_a_base_that_appears_later_as_a_link_opens_nothing(outside: Path, shm_dir: Path) -> None:
    """A base that did not exist at the start is trusted only as the directory that it was spelled to be."""
    bases = AllowedBases([shm_dir / "later"])
    (shm_dir / "later").symlink_to(shm_dir / "outside")
    assert refusal(shm_dir / "later" / "header.ring", bases)[0] == Check.CONTAINMENT


@pytest.mark.parametrize("directories", [[], ["relative"], ["/dev/shm", "."]])
def test_bases_must_be_absolute_and_at_least_one(directories: list[str]) -> None:
    """Anything else is a mistake in the configuration, named by its key."""
    with pytest.raises(ConfigError, match=r"shm\.allowed_base_dirs"):
        AllowedBases(directories)


def test_links_inside_the_base_are_judged_by_their_target(
    inside: Path, outside: Path, bases: AllowedBases, shm_dir: Path
) -> None:
    """Inside to inside is accepted, inside to outside is not, be it the file or a directory on the way."""
    link = shm_dir / "base" / "good.ring"
    link.symlink_to(inside)
    assert first_byte(link, bases) == b"i"
    bad = shm_dir / "base" / "bad.ring"
    bad.symlink_to(outside)
    assert refusal(bad, bases)[0] == Check.CONTAINMENT
    way = shm_dir / "base" / "way"
    way.symlink_to(outside.parent)
    assert refusal(way / "header.ring", bases)[0] == Check.CONTAINMENT


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_character_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def make_block_device(path: Path) -> None:
    os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(7, 0))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_fifo, "FIFO"),
        (make_socket, "socket"),
        (make_character_device, "character device"),
        (make_block_device, "block device"),
        (Path.mkdir, "directory"),
    ],
)
def test_only_regular_files_are_opened(
    make: Callable[[Path], None], kind: str, bases: AllowedBases, shm_dir: Path
) -> None:
    """Everything else is named and refused, without opening it."""
    path = shm_dir / "base" / "x"
    make(path)
    assert refusal(path, bases) == (Check.REGULAR_FILE, f"expected a regular file, found a {kind}")


def test_a_file_that_is_gone_says_so(inside: Path, bases: AllowedBases) -> None:
    """ENOENT has a check of its own: the next announce will name another epoch."""
    inside.unlink()
    check, detail = refusal(inside, bases)
    assert check == Check.MISSING
    assert "its epoch was retired" in detail


def test_a_path_through_a_file_is_refused(inside: Path, bases: AllowedBases) -> None:
    """A component that is no directory."""
    assert refusal(inside / "x", bases)[0] == Check.NO_SYMLINK


def test_a_file_that_is_too_short_is_refused_before_it_could_fault(inside: Path, bases: AllowedBases) -> None:
    """Size is checked on the descriptor: expected and found."""
    assert refusal(inside, bases, size_bytes=1025) == (
        Check.SIZE,
        "expected at least 1025 bytes, found 1024",
    )


def test_huge_pages_are_verified_on_the_file_system(inside: Path, bases: AllowedBases, shm_dir: Path) -> None:
    """tmpfs is refused where huge pages are demanded, hugetlbfs is recognised."""
    check, detail = refusal(inside, bases, require_hugepages=True)
    assert check == Check.HUGEPAGES
    assert "not on hugetlbfs" in detail
    with mounted(shm_dir / "base" / "huge", "hugetlbfs") as huge:
        (huge / "empty").touch()
        assert first_byte(huge / "empty", bases, size_bytes=0, require_hugepages=True) == b""
        fd = os.open(huge / "empty", os.O_RDONLY)
        try:
            page = containment.huge_page_bytes(fd)
            assert page == os.fstatvfs(fd).f_bsize
            assert page >= 1 << 20
            assert containment.mapped_bytes(fd, 1) == page
        finally:
            os.close(fd)


def test_where_huge_pages_cannot_be_verified_they_are_refused(
    inside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No silent downgrade on a platform without a file system type; regions without the demand still open."""
    monkeypatch.setattr(sys, "platform", "plan9")
    containment._fstatfs.cache_clear()
    try:
        assert refusal(inside, bases, require_hugepages=True)[0] == Check.HUGEPAGES
        assert first_byte(inside, bases) == b"i"
    finally:
        containment._fstatfs.cache_clear()


def test_without_no_follow_nothing_is_opened(
    inside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform that cannot open safely rejects every region."""
    monkeypatch.delattr(os, "O_NOFOLLOW")
    assert refusal(inside, bases)[0] == Check.PLATFORM


def swap_before_open(monkeypatch: pytest.MonkeyPatch, name: str, swap: Callable[[], object]) -> None:
    """Do `swap` in the gap between the check of `name` and its opening."""
    real = os.open

    def opening(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if path == name:
            swap()
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", opening)


def test_a_file_swapped_between_check_and_open_is_rejected(
    inside: Path, outside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another regular file at the same path has another identity."""
    swap_before_open(monkeypatch, inside.name, lambda: outside.rename(inside))
    check, detail = refusal(inside, bases)
    assert (check, detail) == (Check.SAME_FILE, "the file was replaced while it was being opened; try again")
    assert open_files(inside.parent) == []


def test_a_link_swapped_in_between_check_and_open_is_rejected(
    inside: Path, outside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening does not follow a link that appeared after the check."""

    def swap() -> None:
        inside.unlink()
        inside.symlink_to(outside)

    swap_before_open(monkeypatch, inside.name, swap)
    assert refusal(inside, bases)[0] == Check.NO_SYMLINK


def test_a_fifo_swapped_in_between_check_and_open_neither_hangs_nor_opens(
    inside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a FIFO for reading would wait for a writer."""

    def swap() -> None:
        inside.unlink()
        os.mkfifo(inside)

    swap_before_open(monkeypatch, inside.name, swap)
    assert refusal(inside, bases)[0] == Check.REGULAR_FILE
    assert open_files(inside.parent) == []


def test_a_directory_swapped_for_a_link_on_the_way_is_rejected(
    inside: Path, outside: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_NOFOLLOW on the whole path would walk through this link; the walk does not."""

    def swap() -> None:
        inside.parent.rename(inside.parent.with_name("moved"))
        inside.parent.symlink_to(outside.parent)

    swap_before_open(monkeypatch, inside.parent.name, swap)
    assert refusal(inside, bases)[0] == Check.NO_SYMLINK


def test_outside_bytes_are_never_read_while_files_are_swapped(inside: Path, outside: Path, bases: AllowedBases) -> None:
    """A thread keeps replacing directory and file by links to the outside: no opening ever gets there."""
    stop = threading.Event()
    parent, spare = inside.parent, inside.parent.with_name("spare")

    def keep_swapping() -> None:
        while not stop.is_set():
            parent.rename(spare)
            parent.symlink_to(outside.parent)
            parent.unlink()
            spare.rename(parent)
            inside.rename(parent / "kept")
            inside.symlink_to(outside)
            inside.unlink()
            (parent / "kept").rename(inside)

    swapper = threading.Thread(target=keep_swapping)
    swapper.start()
    opened: list[bytes] = []
    rejected: list[str] = []
    try:
        while (len(opened) < 100 or len(rejected) < 100) and swapper.is_alive():
            try:
                opened.append(first_byte(inside, bases))
            except RegionRejected as error:
                rejected.append(error.check)
    finally:
        stop.set()
        swapper.join()
    assert len(opened) >= 100
    assert len(rejected) >= 100
    assert set(opened) == {b"i"}
    swapped = {Check.CONTAINMENT, Check.MISSING, Check.NO_SYMLINK, Check.REGULAR_FILE, Check.SAME_FILE}
    assert set(rejected) <= swapped


# Each case in a child of its own, which gives up root.
AS_NOBODY = """
import os, sys
from tensorpool.errors import RegionRejected
from tensorpool.shm import AllowedBases, containment
from tensorpool.wire.region_uri import RegionUri
path, base, *modes = sys.argv[1:]
for file_mode, directory_mode in (mode.split("/") for mode in modes):
    os.chmod(path, int(file_mode, 8))
    os.chmod(os.path.dirname(path), int(directory_mode, 8))
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        containment.open_region(RegionUri(path), AllowedBases([base]), 16)
    except RegionRejected as rejected:
        print(rejected.check, rejected.detail, sep=": ", flush=True)
    os._exit(0)
"""


def test_a_process_that_may_not_read_learns_why_and_what_helps(inside: Path, shm_dir: Path) -> None:
    """EACCES prints our uid and groups, the owner, group and mode in the way, and the fix."""
    shm_dir.chmod(0o755)
    for path in (inside, inside.parent):
        os.chown(path, 0, 64_100)
    code, output = run_script(AS_NOBODY, str(inside), str(shm_dir / "base"), "660/755", "600/755", "660/750")
    who = "it runs as nobody (uid 65534), groups nogroup; found owner root:64100"
    join = "add nobody to group 64100 (usermod -aG 64100 nobody) and start anew"
    assert (code, output.splitlines()) == (
        0,
        [
            f"permission: this process may not read {inside}: {who}, mode 0660; {join}",
            f"permission: this process may not read {inside}: {who}, mode 0600; have root set shm.group "
            'to a group of root and nobody and shm.permissions_mode to "660", and restart the driver',
            f"permission: this process may not search {inside.parent}: {who}, mode 0750; {join}",
        ],
    )
