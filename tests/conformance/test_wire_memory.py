# SPDX-License-Identifier: Apache-2.0
"""Shared memory clauses: superblocks, offsets, the directory tree, and which announced paths are ever mapped.

Files that the driver's side creates are judged by their bytes, read with `struct`; files that the consumer's
side maps are laid out by hand, and /proc/self/maps is the witness that a rejected one is not mapped.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorpool.clock import ManualClock
from tensorpool.errors import LocalProtocolError, RegionRejected, RemoteProtocolError
from tensorpool.shm import (
    AllowedBases,
    EpochTree,
    MappedRing,
    PoolSpec,
    RegionSpec,
    RingSpec,
    containment,
    layout_of,
    map_region,
    map_ring,
)
from tensorpool.wire.control import PayloadPool
from tests.shm.by_hand import (
    POOL,
    RING,
    mapped_files,
    mounted,
    pool_file,
    replace_bytes,
    ring_file,
    uri_of,
)
from tests.support.processes import run_script
from tests.support.region_bytes import MAGIC, superblock

STREAM_ID, EPOCH = 10000, 7
SPEC = RingSpec(4, (PoolSpec(3, 128), PoolSpec(9, 1024)))
RING_SPEC, POOL_SPEC = RingSpec(4, (PoolSpec(3, 128),)).regions(STREAM_ID, EPOCH)


@pytest.fixture
def bases(shm_dir: Path) -> AllowedBases:
    return AllowedBases([shm_dir])


@pytest.fixture
def tree(shm_dir: Path) -> Iterator[EpochTree]:
    with EpochTree.open(str(shm_dir), "lab", clock=ManualClock(1_000, 1_000)) as tree:
        yield tree


def created(tree: EpochTree) -> tuple[MappedRing, Path]:
    """An epoch as a driver makes it, and the directory it is in."""
    ring = tree.create(STREAM_ID, EPOCH, SPEC, 5_000)
    return ring, Path(tree.path, str(STREAM_ID), str(EPOCH))


def rejection(uri: str, spec: RegionSpec, bases: AllowedBases, shm_dir: Path) -> RegionRejected:
    """How mapping `uri` fails; nothing below `shm_dir` is mapped then."""
    with pytest.raises(RegionRejected) as caught:
        map_region(uri, spec, bases)
    assert mapped_files(shm_dir) == []
    return caught.value


# --- §6, §7.1: superblocks


@pytest.mark.spec("WIRE-6-01", "WIRE-6-03", "WIRE-7.1-01")
def test_every_region_starts_with_64_bytes_of_superblock_at_the_schema_offsets(tree: EpochTree) -> None:
    """Each file read with `<QIQIhHIIIQQQ`: the twelve fields, then zeros from byte 64 on."""
    ring, folder = created(tree)
    shared = {"magic": MAGIC, "layout_version": 1, "epoch": 7, "stream_id": 10000, "nslots": 4}
    shared |= {"pid": os.getpid(), "start_timestamp_ns": 5_000, "activity_timestamp_ns": 5_000}
    own = {
        "header.ring": {"region_type": 1, "pool_id": 0, "slot_bytes": 256, "stride_bytes": 0},
        "3.pool": {"region_type": 2, "pool_id": 3, "slot_bytes": 128, "stride_bytes": 128},
        "9.pool": {"region_type": 2, "pool_id": 9, "slot_bytes": 1024, "stride_bytes": 1024},
    }
    assert {path.name: superblock(path) for path in folder.iterdir()} == {
        name: shared | fields for name, fields in own.items()
    }
    for path in folder.iterdir():
        assert set(path.read_bytes()[64:]) == {0}
    assert ring.epoch == EPOCH


@pytest.mark.spec("WIRE-7.1-02")
def test_the_magic_is_the_number_in_little_endian(tree: EpochTree) -> None:
    """The first eight bytes of every region."""
    _, folder = created(tree)
    for path in folder.iterdir():
        assert path.read_bytes()[:8] == bytes.fromhex("31 4D 48 53 4C 50 4F 54")


@pytest.mark.spec("WIRE-7.1-03")
@pytest.mark.parametrize("byte", range(8))
def test_any_other_magic_is_invalid(shm_dir: Path, bases: AllowedBases, byte: int) -> None:
    """One flipped bit in any of its bytes and the region is not mapped."""
    uri = ring_file(shm_dir / "r", magic=RING["magic"] ^ 1 << 8 * byte)
    assert rejection(uri, RING_SPEC, bases, shm_dir).detail.startswith("magic: expected 0x544f504c53484d31")


@pytest.mark.spec("WIRE-7.1-04")
def test_only_the_activity_timestamp_ever_changes(tree: EpochTree) -> None:
    """Refreshing and writing frames leave the other 56 bytes of each superblock alone."""
    ring, folder = created(tree)
    before = {path: path.read_bytes()[:64] for path in folder.iterdir()}
    writer = ring.writer()
    for seq in range(9):
        frame = np.full(40 + 80 * (seq % 2), seq, np.uint8)
        writer.write(seq, layout_of(frame), frame)
    ring.refresh_activity(9_000)
    for path, block in before.items():
        assert path.read_bytes()[:56] == block[:56]
        assert path.read_bytes()[56:64] == (9_000).to_bytes(8, "little")


@pytest.mark.spec("WIRE-7.1-07", "WIRE-15.1-01")
def test_the_layout_version_governs_compatibility(shm_dir: Path, bases: AllowedBases) -> None:
    """All else equal, another layout_version than announced is rejected, and the announced one accepted."""
    uri = ring_file(shm_dir / "r", layout_version=2)
    assert rejection(uri, RING_SPEC, bases, shm_dir).detail == "layout_version: expected 1, found 2"
    spec = RingSpec(4, (PoolSpec(3, 128),)).regions(STREAM_ID, EPOCH, layout_version=2)[0]
    assert map_region(uri, spec, bases).spec.layout_version == 2


@pytest.mark.spec("WIRE-7.1-09", "WIRE-7.1-10", "WIRE-7.1-11", "WIRE-15.5-01")
def test_region_type_pool_id_and_nslots_of_every_file(tree: EpochTree) -> None:
    """The ring is type 1 and pool 0; pools are type 2 with the id of their announce; all have one nslots."""
    ring, folder = created(tree)
    found = {path: superblock(path) for path in folder.iterdir()}
    header = found.pop(Path(ring.header.uri.removeprefix("shm:file?path=")))
    assert (header["region_type"], header["pool_id"]) == (1, 0)
    announced = {Path(pool.uri.removeprefix("shm:file?path=")): pool.spec.pool_id for pool in ring.pools}
    assert {path: fields["pool_id"] for path, fields in found.items()} == announced
    assert {fields["region_type"] for fields in found.values()} == {2}
    assert {fields["nslots"] for fields in (header, *found.values())} == {4}


# --- §8.1, §9: where slots are


@pytest.mark.spec("WIRE-8.1-01", "WIRE-8.1-02", "WIRE-9-01")
def test_slots_lie_behind_the_superblock(tree: EpochTree) -> None:
    """Frame k changes 256 bytes at 64 + i*256 of the ring, its payload lies at 64 + i*stride, i = k mod 4."""
    ring, folder = created(tree)
    assert (folder / "header.ring").stat().st_size == 64 + 4 * 256
    assert (folder / "9.pool").stat().st_size == 64 + 4 * 1024
    writer = ring.writer()
    for seq in range(6):
        headers, payloads = (folder / "header.ring").read_bytes(), (folder / "9.pool").read_bytes()
        frame = np.full(700, 0x80 | seq, np.uint8)
        writer.write(seq, layout_of(frame), frame)
        index = seq % 4
        at, changed = 64 + index * 256, (folder / "header.ring").read_bytes()
        assert changed[at : at + 8] == (seq << 1 | 1).to_bytes(8, "little")
        assert changed[:at] == headers[:at]
        assert changed[at + 256 :] == headers[at + 256 :]
        at, changed = 64 + index * 1024, (folder / "9.pool").read_bytes()
        assert changed[at : at + 700] == frame.tobytes()
        assert changed[:at] == payloads[:at]
        assert changed[at + 700 :] == payloads[at + 700 :]


# --- §15.1, §15.5, §15.13: what a consumer believes


@pytest.mark.spec("WIRE-15.1-02", "WIRE-15.1-03", "WIRE-15.1-04", "WIRE-15.1-05", "WIRE-15.1-06")
@pytest.mark.parametrize(
    ("is_pool", "field", "value", "text"),
    [
        (False, "nslots", 8, "nslots: expected 4, found 8"),
        (True, "nslots", 2, "nslots: expected 4, found 2"),
        (False, "slot_bytes", 128, "slot_bytes: expected 256, found 128"),
        (True, "stride_bytes", 256, "stride_bytes: expected 128, found 256"),
        (False, "region_type", 2, "region_type: expected HEADER_RING, found PAYLOAD_POOL"),
        (True, "region_type", 1, "region_type: expected PAYLOAD_POOL, found HEADER_RING"),
        (True, "pool_id", 4, "pool_id: expected 3, found 4"),
        (True, "pool_id", 0, "pool_id: expected 3, found 0"),
    ],
)
def test_a_superblock_that_contradicts_the_announce_is_rejected(
    shm_dir: Path, bases: AllowedBases, is_pool: bool, field: str, value: int, text: str
) -> None:
    """One field at a time; the diagnostic is that field, expected and found, and nothing else."""
    make, spec = (pool_file, POOL_SPEC) if is_pool else (ring_file, RING_SPEC)
    assert map_region(make(shm_dir / "good"), spec, bases).uri == uri_of(shm_dir / "good")
    assert rejection(make(shm_dir / "bad", **{field: value}), spec, bases, shm_dir).detail == text


@pytest.mark.spec("WIRE-15.13-01")
@pytest.mark.parametrize(("is_pool", "fields"), [(False, RING), (True, POOL)], ids=["ring", "pool"])
def test_validation_fails_closed_for_every_field(
    shm_dir: Path, bases: AllowedBases, is_pool: bool, fields: dict[str, int]
) -> None:
    """A flipped bit in any byte of a field that is checked, or a file cut short, and nothing is mapped."""
    make, spec = (pool_file, POOL_SPEC) if is_pool else (ring_file, RING_SPEC)
    uri = make(shm_dir / "r")
    sound = (shm_dir / "r").read_bytes()
    free = range(36, 40) if not is_pool else ()  # a ring's stride_bytes (A9); 40..63 are identity and liveness
    for byte in (byte for byte in range(40) if byte not in free):
        (shm_dir / "r").write_bytes(sound[:byte] + bytes([sound[byte] ^ 0x10]) + sound[byte + 1 :])
        assert rejection(uri, spec, bases, shm_dir).check == "superblock"
    for size in (0, 63, 64, len(sound) - 1):
        (shm_dir / "r").write_bytes(sound[:size])
        assert rejection(uri, spec, bases, shm_dir).check == "size"
    (shm_dir / "r").write_bytes(sound)
    assert map_region(uri, spec, bases).superblock.magic == fields["magic"]


@pytest.mark.spec("WIRE-15.13-03")
def test_files_recreated_under_another_epoch_are_noticed(shm_dir: Path, bases: AllowedBases) -> None:
    """A mapping of the old file stays as it was; its path no longer maps as the old epoch, but as the new."""
    uri = ring_file(shm_dir / "r")
    old = map_region(uri, RING_SPEC, bases)
    (shm_dir / "r").unlink()
    ring_file(shm_dir / "r", epoch=8)
    old.revalidate()
    with pytest.raises(RegionRejected, match="epoch: expected 7, found 8"):
        map_region(uri, RING_SPEC, bases)
    new = map_region(uri, RingSpec(4, (PoolSpec(3, 128),)).regions(STREAM_ID, 8)[0], bases)
    replace_bytes(shm_dir / "r", 0, bytes(8))
    with pytest.raises(RegionRejected, match="magic: expected"):
        new.revalidate()


@pytest.mark.spec("WIRE-15.5-02")
def test_pools_whose_nslots_differ_from_the_ring_are_rejected() -> None:
    """A forged announce gives no ring at all."""
    pools = [PayloadPool(pool_id=1, pool_nslots=8, stride_bytes=64)]
    with pytest.raises(RemoteProtocolError, match="pool 1: nslots = 8: expected the ring's 4"):
        RingSpec.announced(4, 256, pools)


# --- §15.10, §15.21a.3, §15.21a.6: the tree


@pytest.mark.spec("WIRE-15.10-01", "WIRE-15.21a.6-01")
@pytest.mark.parametrize(("mode", "files", "directories"), [(0o660, "660", "2750"), (0o600, "600", "700")])
def test_modes_keep_other_users_out_whatever_the_umask(shm_dir: Path, mode: int, files: str, directories: str) -> None:
    """0660 in 2750 for a group, 0600 in 0700 for one user, from the user's directory down."""
    before = os.umask(0)
    try:
        with EpochTree.open(str(shm_dir), clock=ManualClock(), file_mode=mode) as tree:
            created(tree)
    finally:
        os.umask(before)
    modes: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (shm_dir / "tensorpool-root", *(shm_dir / "tensorpool-root").rglob("*")):
        if path.name.startswith("highest-epoch."):  # the driver's own record
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        else:
            modes[path.is_dir()].add(f"{stat.S_IMODE(path.stat().st_mode):o}")
    assert modes == {True: {directories}, False: {files}}


AS_NOBODY = """
import os, sys
from tensorpool.clock import SystemClock
from tensorpool.shm import EpochTree, PoolSpec, RingSpec
os.environ |= {"USER": "../../etc", "LOGNAME": "root", "HOME": "/root"}
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
tree = EpochTree.open(sys.argv[1], clock=SystemClock())
tree.create(10000, 7, RingSpec(4, (PoolSpec(3, 128),)), 1)
"""


@pytest.mark.spec("WIRE-15.10-02", "WIRE-15.21a.3-02", "WIRE-15.21a.3-03")
def test_the_tree_is_named_after_and_owned_by_the_effective_user(shm_dir: Path) -> None:
    """As another user, with an environment that lies: its own directory, its own files, nothing outside."""
    shm_dir.chmod(0o777)
    assert run_script(AS_NOBODY, str(shm_dir)) == (0, "")
    assert [path.name for path in shm_dir.iterdir()] == [f"tensorpool-{pwd.getpwuid(65534).pw_name}"]
    files = [path for path in shm_dir.rglob("*") if path.suffix in (".ring", ".pool")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {(65534, 65534)}
    assert len(files) == 2


@pytest.mark.spec("WIRE-15.21a.3-03")
def test_an_account_name_with_slashes_does_not_traverse(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number takes its place."""
    evil = pwd.struct_passwd(("../../etc", "", 0, 0, "", "", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: evil)
    with EpochTree.open(str(shm_dir / "base"), clock=ManualClock()):
        assert [path.name for path in (shm_dir / "base").iterdir()] == ["tensorpool-0"]
        assert [path.name for path in shm_dir.iterdir()] == ["base"]


@pytest.mark.spec("WIRE-15.21a.3-01", "WIRE-15.21a.3-05", "WIRE-15.21a.3-06")
def test_backing_files_follow_the_canonical_layout(tree: EpochTree, shm_dir: Path) -> None:
    """base/tensorpool-user/namespace/stream/epoch, with the same names in every epoch."""
    for epoch in (7, 8):
        ring = tree.create(STREAM_ID, epoch, SPEC, 1)
        folder = shm_dir / "tensorpool-root" / "lab" / "10000" / str(epoch)
        assert sorted(path.name for path in folder.iterdir()) == ["3.pool", "9.pool", "header.ring"]
        assert ring.header.uri == uri_of(folder / "header.ring")
        assert [pool.uri for pool in ring.pools] == [uri_of(folder / "3.pool"), uri_of(folder / "9.pool")]
        assert {superblock(path)["epoch"] for path in folder.iterdir()} == {epoch}


# --- §15.21a.2, §15.21a.4, §15.21a.5: what is mapped


@pytest.mark.spec("WIRE-15.21a.2-02")
def test_several_base_directories_may_be_allowed(shm_dir: Path) -> None:
    """Regions below either are mapped, below neither are not."""
    for name in ("a", "b", "c"):
        (shm_dir / name).mkdir()
    bases = AllowedBases([shm_dir / "a", shm_dir / "b"])
    for name in ("a", "b"):
        map_region(ring_file(shm_dir / name / "r"), RING_SPEC, bases)
    assert rejection(ring_file(shm_dir / "c" / "r"), RING_SPEC, bases, shm_dir).check == "containment"


# In a process of its own: an audit hook sees every call of the interpreter, and cannot be taken off again.
WATCHED = """
import os, sys
from tensorpool.shm import AllowedBases, PoolSpec, RingSpec, map_ring
listed = []
sys.addaudithook(lambda event, _: event in ("os.listdir", "os.scandir", "glob.glob") and listed.append(event))
base, *uris = sys.argv[1:]
spec = RingSpec(4, (PoolSpec(3, 128),))
ring = map_ring(spec, uris, AllowedBases([base]), stream_id=10000, epoch=7)
ring.revalidate()
assert [region.uri for region in ring.regions] == uris
print(listed)
os.listdir(base)
print(listed)
"""


@pytest.mark.spec("WIRE-15.21a.4-02", "WIRE-15.21a.4-03")
def test_regions_are_found_by_their_uris_alone(shm_dir: Path) -> None:
    """Files off any layout, under any name, are mapped; no directory is listed meanwhile."""
    (shm_dir / "somewhere").mkdir()
    uris = [ring_file(shm_dir / "somewhere" / "x.bin"), pool_file(shm_dir / "y")]
    code, output = run_script(WATCHED, str(shm_dir), *uris)
    assert (code, output) == (0, "[]\n['os.listdir']\n")  # the second line: the witness was awake


@pytest.mark.spec("WIRE-15.21a.5-01")
@pytest.mark.parametrize("path", ["{0}/r", "./{0}/r", "r"])
def test_relative_paths_are_rejected(
    shm_dir: Path, bases: AllowedBases, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where they would lead to a region below an allowed base."""
    ring_file(shm_dir / "r")
    monkeypatch.chdir(shm_dir if path == "r" else "/")
    relative = path.format(str(shm_dir).lstrip("/"))
    assert os.path.exists(relative)
    assert rejection(f"shm:file?path={relative}", RING_SPEC, bases, shm_dir).check == "path"


@pytest.mark.spec("WIRE-15.21a.5-02", "WIRE-15.21a.5-04", "WIRE-15.21a.5-09")
@pytest.mark.parametrize(
    "path",
    [
        "base/../outside/r",
        "base/link/r",
        "base/link/../outside/r",
        "base/file",
        "base-evil/r",
        "outside/r",
        "base/../base-evil/r",
    ],
)
def test_paths_that_lead_outside_are_rejected(shm_dir: Path, path: str) -> None:
    """By dots, by links, by a common prefix: what counts is the canonical path, component by component."""
    for name in ("base", "outside", "base-evil"):
        (shm_dir / name).mkdir()
        ring_file(shm_dir / name / "r")
    (shm_dir / "base" / "link").symlink_to(shm_dir / "outside")
    (shm_dir / "base" / "file").symlink_to(shm_dir / "outside" / "r")
    bases = AllowedBases([shm_dir / "base"])
    rejected = rejection(f"shm:file?path={shm_dir}/{path}", RING_SPEC, bases, shm_dir)
    assert rejected.check == "containment"
    assert f"is not inside {shm_dir}/base" in rejected.detail


@pytest.mark.spec("WIRE-15.21a.5-02")
@pytest.mark.parametrize("path", ["base/sub/../r", "base/./r", "base/link", "way/r"])
def test_paths_that_lead_inside_are_accepted(shm_dir: Path, path: str) -> None:
    """The same detours, ending below the base: only a resolved path can tell the difference."""
    (shm_dir / "base" / "sub").mkdir(parents=True)
    ring_file(shm_dir / "base" / "r")
    (shm_dir / "base" / "link").symlink_to("r")
    (shm_dir / "way").symlink_to(shm_dir / "base")
    region = map_region(f"shm:file?path={shm_dir}/{path}", RING_SPEC, AllowedBases([shm_dir / "base"]))
    assert mapped_files(shm_dir) == [f"{shm_dir}/base/r"]
    assert region.superblock.stream_id == STREAM_ID


@pytest.mark.spec("WIRE-15.21a.5-03")
def test_bases_are_resolved_once(shm_dir: Path) -> None:
    """A base that is a link stands for where it led at the start, also after the link was turned around."""
    for name in ("first", "second"):
        (shm_dir / name).mkdir()
        ring_file(shm_dir / name / "r")
    (shm_dir / "base").symlink_to("first")
    bases = AllowedBases([shm_dir / "base"])
    map_region(uri_of(shm_dir / "base" / "r"), RING_SPEC, bases)
    (shm_dir / "base").unlink()
    (shm_dir / "base").symlink_to("second")
    assert rejection(uri_of(shm_dir / "base" / "r"), RING_SPEC, bases, shm_dir).check == "containment"
    map_region(uri_of(shm_dir / "first" / "r"), RING_SPEC, bases)


@pytest.mark.spec("WIRE-15.21a.5-05")
@pytest.mark.parametrize("kind", ["directory", "FIFO", "socket", "character device", "block device"])
def test_only_regular_files_are_mapped(shm_dir: Path, bases: AllowedBases, kind: str) -> None:
    """Whatever else lies at the path is named and left alone."""
    path = shm_dir / "r"
    match kind:
        case "directory":
            path.mkdir()
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case "character device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        case "block device":
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 0))
    rejected = rejection(uri_of(path), RING_SPEC, bases, shm_dir)
    assert (rejected.check, rejected.detail) == ("regular file", f"expected a regular file, found a {kind}")


@pytest.fixture
def swapped(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Puts paths[1] in the place of paths[0] just before the latter is opened, when its checks are done."""
    real = os.open
    paths: list[Path] = []

    def opening(name: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if paths and name == paths[0].name:
            target, replacement = paths
            paths.clear()
            target.rename(target.with_name("aside"))
            replacement.rename(target)
        return real(name, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", opening)
    yield paths
    assert paths == []  # it happened


@pytest.mark.spec("WIRE-15.21a.5-06", "WIRE-15.21a.5-09")
@pytest.mark.parametrize("component", ["base/sub/r", "base/sub"])
def test_a_link_swapped_in_before_the_opening_is_not_followed(
    shm_dir: Path, swapped: list[Path], component: str
) -> None:
    """Neither as the file nor as a directory on its way: the region outside is valid, and never mapped."""
    (shm_dir / "base" / "sub").mkdir(parents=True)
    (shm_dir / "outside").mkdir()
    uri = ring_file(shm_dir / "base" / "sub" / "r")
    ring_file(shm_dir / "outside" / "r")
    link = shm_dir / "link"
    link.symlink_to(shm_dir / "outside" / ("r" if component.endswith("r") else ""))
    bases = AllowedBases([shm_dir / "base"])
    swapped += [shm_dir / component, link]
    assert rejection(uri, RING_SPEC, bases, shm_dir).check == "no symlink"


@pytest.mark.spec("WIRE-15.21a.5-07", "WIRE-15.21a.5-09")
def test_a_file_swapped_before_the_opening_is_not_the_file_that_was_checked(
    shm_dir: Path, bases: AllowedBases, swapped: list[Path]
) -> None:
    """Device and inode on the descriptor differ from those that were checked, though the region is valid."""
    uri = ring_file(shm_dir / "r")
    ring_file(shm_dir / "other")
    swapped += [shm_dir / "r", shm_dir / "other"]
    assert rejection(uri, RING_SPEC, bases, shm_dir).check == "same file"
    map_region(uri, RING_SPEC, bases)


@pytest.mark.spec("WIRE-15.21a.5-07")
def test_the_type_is_checked_again_on_the_descriptor(shm_dir: Path, bases: AllowedBases, swapped: list[Path]) -> None:
    """A FIFO in the file's place neither hangs the consumer nor is taken for a region."""
    uri = ring_file(shm_dir / "r")
    os.mkfifo(shm_dir / "fifo")
    swapped += [shm_dir / "r", shm_dir / "fifo"]
    assert rejection(uri, RING_SPEC, bases, shm_dir).check == "regular file"


@pytest.mark.spec("WIRE-15.21a.5-08")
def test_without_a_safe_opening_nothing_is_mapped(
    shm_dir: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform without no-follow rejects a region that is sound in every way."""
    uri = ring_file(shm_dir / "r")
    monkeypatch.delattr(os, "O_NOFOLLOW")
    assert rejection(uri, RING_SPEC, bases, shm_dir).check == "platform"


# --- §15.22: backends


@pytest.mark.spec("WIRE-15.22-09")
def test_required_hugepages_are_verified(shm_dir: Path, bases: AllowedBases) -> None:
    """A sound region on tmpfs is rejected with the flag and mapped without; hugetlbfs passes this check."""
    uri = ring_file(shm_dir / "r")
    rejected = rejection(f"{uri}|require_hugepages=true", RING_SPEC, bases, shm_dir)
    assert rejected.check == "require_hugepages"
    map_region(f"{uri}|require_hugepages=false", RING_SPEC, bases)
    with mounted(shm_dir / "huge", "hugetlbfs") as huge:
        (huge / "r").touch()  # empty: the size, which is looked at last, is all that is wrong with it
        uri = f"{uri_of(huge / 'r')}|require_hugepages=true"
        assert rejection(uri, RING_SPEC, bases, shm_dir).check == "size"


@pytest.mark.spec("WIRE-15.22-10")
def test_hugepages_that_cannot_be_verified_are_rejected(
    shm_dir: Path, bases: AllowedBases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a platform that does not tell, the flag is never waved through, not even on hugetlbfs."""
    monkeypatch.setattr(containment, "_fstatfs", lambda: None)
    with mounted(shm_dir / "huge", "hugetlbfs") as huge:
        (huge / "r").touch()
        uri = f"{uri_of(huge / 'r')}|require_hugepages=true"
        assert rejection(uri, RING_SPEC, bases, shm_dir).check == "require_hugepages"


@pytest.mark.spec("WIRE-15.22-11", "WIRE-15.22-12")
def test_strides_are_powers_of_two_from_64_whatever_the_page_size() -> None:
    """Far less than a page is fine; multiples of 64 and of the page that are no power of two are foreign (K7)."""
    for stride in (64, 128, 256, 4096, 1 << 30):
        pools = [PayloadPool(pool_id=1, pool_nslots=4, stride_bytes=stride)]
        assert RingSpec.announced(4, 256, pools).pools == (PoolSpec(1, stride),)
    for stride in (0, 1, 32, 63, 65, 96, 2**31 + 64, 2**32 - 1):
        with pytest.raises(LocalProtocolError, match="stride_bytes"):
            PoolSpec(1, stride)
        with pytest.raises(RemoteProtocolError, match="stride_bytes"):
            RingSpec.announced(4, 256, [PayloadPool(pool_id=1, pool_nslots=4, stride_bytes=stride)])
    for stride in (192, 320, 4096 + 64, 3 * 4096, 2**31 - 64):
        with pytest.raises(LocalProtocolError, match="stride_bytes"):
            PoolSpec(1, stride)
        foreign = RingSpec.announced(4, 256, [PayloadPool(pool_id=1, pool_nslots=4, stride_bytes=stride)])
        assert foreign.size_bytes == 64 + 4 * 256 + 64 + 4 * stride


@pytest.mark.spec("WIRE-15.22-13")
def test_one_bad_pool_rejects_the_whole_stream(shm_dir: Path, bases: AllowedBases) -> None:
    """The header ring and the good pool were sound, and are not mapped either."""
    spec = RingSpec(4, (PoolSpec(3, 128), PoolSpec(4, 128)))
    uris = [ring_file(shm_dir / "r"), pool_file(shm_dir / "3"), pool_file(shm_dir / "4", pool_id=5)]
    with pytest.raises(RegionRejected, match="pool_id: expected 4, found 5") as caught:
        map_ring(spec, uris, bases, stream_id=STREAM_ID, epoch=EPOCH)
    assert mapped_files(shm_dir) == []
    assert caught.value.uri == uris[2]
