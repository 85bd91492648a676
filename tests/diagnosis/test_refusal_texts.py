# SPDX-License-Identifier: Apache-2.0
"""Every refusal says what was expected, what was found, in which file, and what to do; what agrees is not listed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tensorpool import __version__
from tensorpool.errors import AttachRefused, RegionRejected, RemoteProtocolError
from tensorpool.shm import AllowedBases, Backing, Check, PoolSpec, RegionSpec, RingSpec, containment, create_region
from tensorpool.shm import region as module
from tensorpool.shm.announced import Regions, flaw_in
from tensorpool.shm.region import map_region
from tensorpool.shm.space import require_space
from tensorpool.wire.driver import PayloadPool, ResponseCode, ShmAttachResponse
from tensorpool.wire.region_uri import RegionUri
from tests.shm.by_hand import folder, mounted, pool_file, replace_bytes, ring_file, uri_of
from tests.support.processes import ROOT

SPECS: Final = RingSpec(4, (PoolSpec(3, 128),)).regions(10000, 7)
RING: Final[RegionSpec] = SPECS[0]
POOL: Final[RegionSpec] = SPECS[1]
NEW_FILES: Final = "restart the driver, which makes new files"


def refused(act: Callable[[], object]) -> RegionRejected:
    with pytest.raises(RegionRejected) as caught:
        act()
    return caught.value


def mapping_refused(uri: str, shm_dir: Path, spec: RegionSpec = RING) -> RegionRejected:
    return refused(lambda: map_region(uri, spec, AllowedBases([shm_dir])))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"layout_version": 2},
            "layout_version: expected 1, found 2; update the older of driver and client: both need the same layout "
            f"version (this is tensorpool {__version__}, layout version 1)",
        ),
        (
            {"epoch": 6},
            "epoch: expected 7, found 6; the file is of another epoch; the next announce names the current one",
        ),
        (
            {"stream_id": 10001, "epoch": 8},
            "epoch: expected 7, found 8; stream_id: expected 10000, found 10001; the file is another region's: do two "
            "drivers share shm.base_dir and shm.namespace? See `tensorpool doctor`",
        ),
        ({"nslots": 8}, f"nslots: expected 4, found 8; file and announce disagree: {NEW_FILES}"),
        ({"slot_bytes": 512}, f"slot_bytes: expected 256, found 512; file and announce disagree: {NEW_FILES}"),
        (
            {"magic": 0},
            "magic: expected 0x544f504c53484d31, found 0x0000000000000000 (never initialised, or still being created); "
            "the next announce may name a finished one; else another program writes to this file",
        ),
    ],
)
def test_a_superblock_is_compared_field_by_field(changed: dict[str, int], text: str, shm_dir: Path) -> None:
    """Only what differs, both values, the file, and a remedy that fits what differs."""
    uri = ring_file(shm_dir / "r", **changed)
    assert str(mapping_refused(uri, shm_dir)) == f"{uri}: superblock: {text}"


def test_a_pool_with_another_stride_is_described_by_its_own_fields(shm_dir: Path) -> None:
    """A pool's stride and slot size; the type by name."""
    uri = pool_file(shm_dir / "p", stride_bytes=256, slot_bytes=256)
    text = "stride_bytes: expected 128, found 256; slot_bytes: expected 128, found 256; file and announce disagree"
    assert str(mapping_refused(uri, shm_dir, POOL)) == f"{uri}: superblock: {text}: {NEW_FILES}"
    other = ring_file(shm_dir / "r", nslots=4)
    (shm_dir / "r").write_bytes((shm_dir / "r").read_bytes() + bytes(1024))
    assert "region_type: expected PAYLOAD_POOL, found HEADER_RING" in str(mapping_refused(other, shm_dir, POOL))


def test_a_region_that_changes_hands_says_so(shm_dir: Path) -> None:
    """Revalidated: another epoch in the same file, or another writer in the same epoch."""
    uri = ring_file(shm_dir / "r")
    region = map_region(uri, RING, AllowedBases([shm_dir]))
    replace_bytes(shm_dir / "r", 40, (4712).to_bytes(8, "little"))
    assert str(refused(region.revalidate)) == (
        f"{uri}: second writer: pid: expected 4711, found 4712; two processes write one epoch: stop one of them; the "
        "next epoch is whole again"
    )
    replace_bytes(shm_dir / "r", 12, (9).to_bytes(8, "little"))
    assert "superblock: epoch: expected 7, found 9; the file is of another epoch" in str(refused(region.revalidate))


def test_files_that_cannot_be_regions_say_what_they_are(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, cut short, no file, a link in the way, outside: each with its remedy."""
    missing = mapping_refused(uri_of(shm_dir / "gone"), shm_dir)
    assert str(missing) == (
        f"shm:file?path={shm_dir}/gone: missing: there is no such file; its epoch was retired, or another host or "
        "container announced it; the next announce names another; containers have to share /dev/shm (`--ipc=host`, or "
        "a volume)"
    )
    (shm_dir / "short").write_bytes(bytes(100))
    assert str(mapping_refused(uri_of(shm_dir / "short"), shm_dir)) == (
        f"shm:file?path={shm_dir}/short: size: expected at least 1088 bytes, found 100; it was cut short, or announced "
        f"with another layout: {NEW_FILES}"
    )
    (shm_dir / "folder").mkdir()
    assert str(mapping_refused(uri_of(shm_dir / "folder"), shm_dir)) == (
        f"shm:file?path={shm_dir}/folder: regular file: expected a regular file, found a directory; a driver never "
        "makes such: find out who put it there, and remove it"
    )
    inside = mapping_refused(uri_of(shm_dir / "short" / "x"), shm_dir)
    assert str(inside) == (
        f"shm:file?path={shm_dir}/short/x: no symlink: a component of the path is no directory, or links were swapped "
        f"while it was checked; look at `namei -l {shm_dir}/short/x`"
    )
    outside = mapping_refused(uri_of(Path("/etc/passwd")), shm_dir)
    assert str(outside) == (
        f"shm:file?path=/etc/passwd: containment: /etc/passwd is not inside {shm_dir}; add its directory to "
        "allowed_base_dirs if you trust it"
    )
    too_long = mapping_refused(uri_of(shm_dir / ("x" * 300)), shm_dir)
    assert str(too_long).endswith("open: File name too long; see `tensorpool doctor`")
    monkeypatch.setattr(containment, "_CAN_WALK", False)
    assert str(mapping_refused(uri_of(shm_dir / "short"), shm_dir)).endswith(
        "platform: this platform cannot open a file without following links; use Linux, or attach through a bridge"
    )


def test_a_file_that_is_swapped_or_cannot_be_mapped_says_so(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file under the same name, pages of the wrong kind, and a system that has no room for the mapping."""
    uri = ring_file(shm_dir / "r")
    huge = mapping_refused(f"{uri}|require_hugepages=true", shm_dir)
    assert str(huge).endswith(
        "require_hugepages: the file is not on hugetlbfs, as far as can be verified; put shm.base_dir on a hugetlbfs "
        "mount"
    )

    def no_room(*_arguments: object, **_options: Any) -> None:
        raise OSError(12, "mmap")

    with monkeypatch.context() as patch:
        patch.setattr(module, "Mapping", no_room)
        assert str(mapping_refused(uri, shm_dir)) == (
            f"{uri}: mapping: Cannot allocate memory; 1088 bytes have to be mapped: look at `ulimit -v` and "
            "vm.max_map_count"
        )
    genuine = os.stat

    def stale_stat(path: str, **options: Any) -> os.stat_result:
        if options.get("dir_fd") is None:
            return genuine(path, **options)
        return genuine("/etc/passwd")  # a regular file, and another one

    monkeypatch.setattr(os, "stat", stale_stat)
    assert str(mapping_refused(uri, shm_dir)).endswith(
        "same file: the file was replaced while it was being opened; try again"
    )


def test_what_cannot_be_created_says_why(shm_dir: Path) -> None:
    """There already, no huge pages, no room: the bill."""
    (shm_dir / "r").touch()
    with folder(shm_dir) as fd:
        uri = RegionUri(str(shm_dir / "r"))
        taken = refused(lambda: create_region(uri, RING, 1, dir_fd=fd, backing=Backing()))
        assert str(taken) == (
            f"{uri}: create: File exists; look at `ls -la {shm_dir}`; is another program at work there?"
        )
        huge = RegionUri(str(shm_dir / "h"), require_hugepages=True)
        assert str(refused(lambda: create_region(huge, RING, 1, dir_fd=fd, backing=Backing()))) == (
            f"{huge}: require_hugepages: shm.base_dir is not on hugetlbfs; mount one there: mount -t hugetlbfs none "
            "DIR, or set shm.require_hugepages = false"
        )
    with mounted(shm_dir / "small", "tmpfs", "size=1m") as small, folder(small) as fd:
        regions = RingSpec(16, (PoolSpec(1, 1 << 20),)).regions(1, 1)
        bill = refused(lambda: require_space("shm:file?path=/x", fd, str(small), regions))
        assert re.fullmatch(
            rf"shm:file\?path=/x: space: needs 16789504 bytes \(16\.0 MiB\), {small} has \d+ bytes \(1\.0 MiB\) free "
            rf"of 1048576 bytes \(1\.0 MiB\); enlarge it \(mount -o remount,size=17m {small}; for Docker's /dev/shm "
            r"--shm-size=17m\), or ask for fewer slots or smaller strides",
            str(bill),
        )


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("http://x", "http://x: scheme: only shm:file is supported"),
        ("shm:file?dir=/x", "shm:file?dir=/x: path: path comes first and is required, found 'dir'"),
        (
            "shm:file?path=x",
            "shm:file?path=x: path: an absolute path of visible ASCII without '?' and '|' is needed, not 'x'",
        ),
        (
            "shm:file?path=/x|mode=1",
            "shm:file?path=/x|mode=1: parameter: one require_hugepages may follow the path, found 'mode=1'",
        ),
        (
            "shm:file?path=/x|require_hugepages=1",
            "shm:file?path=/x|require_hugepages=1: require_hugepages: true or false is needed, not '1'",
        ),
        (
            "shm:file?path=/x&require_hugepages=true",
            "shm:file?path=/x&require_hugepages=true: separator: parameters are separated by '|', not by '&'",
        ),
    ],
)
def test_uris_that_are_none_say_what_is_accepted(uri: str, text: str) -> None:
    """The rule by name, what is accepted, and what was found."""
    assert str(refused(lambda: RegionUri.parse(uri))) == text


def test_every_rule_has_its_text_asserted() -> None:
    """Here or, for what takes another account to see, in the tests named below; a new rule needs a new sentence."""
    here = Path(__file__).read_text("utf-8")
    elsewhere = {
        Check.PERMISSION: "tests/shm/test_containment.py",
        Check.MLOCK: "tests/shm/test_region.py",
    }
    for check in Check:
        if check in elsewhere:
            assert f"{check}: " in (ROOT / elsewhere[check]).read_text("utf-8")
        else:
            assert f"{check}: " in here, f"no sentence of {check} is asserted"


def response(**changed: Any) -> ShmAttachResponse:
    fields: dict[str, object] = {
        "correlation_id": 1,
        "code": ResponseCode.OK,
        "lease_id": 5,
        "stream_id": 10000,
        "epoch": 7,
        "layout_version": 1,
        "header_nslots": 4,
        "header_slot_bytes": 256,
        "max_dims": 8,
        "header_region_uri": "shm:file?path=/dev/shm/x",
        "payload_pools": (
            PayloadPool(pool_id=3, pool_nslots=4, stride_bytes=128, region_uri="shm:file?path=/dev/shm/y"),
        ),
    }
    return ShmAttachResponse(**(fields | changed))  # type: ignore[arg-type]


def test_an_answer_that_cannot_be_used_is_compared_field_by_field() -> None:
    """Expected and found, as everywhere."""
    pool = PayloadPool(pool_id=3, pool_nslots=8, stride_bytes=128, region_uri="shm:file?path=/dev/shm/y")
    assert flaw_in(response(), 10000) is None
    assert flaw_in(response(header_slot_bytes=512), 10000) == "announced ring: header_slot_bytes = 512: expected 256"
    assert flaw_in(response(max_dims=4), 10000) == "max_dims: expected 8, found 4"
    nslots = "announced ring: pool 3: nslots = 8: expected the ring's 4"
    assert flaw_in(response(payload_pools=(pool,)), 10000) == nslots
    with pytest.raises(RemoteProtocolError) as caught:
        Regions.of(response(layout_version=2))
    assert str(caught.value) == "layout_version: expected 1, found 2; update the older of driver and client"


def test_a_refused_attach_repeats_the_drivers_words() -> None:
    """Who asked for what, the code, and the words, or that there were none."""
    taken = AttachRefused("REJECTED", "camera/front", "PRODUCER", "stream 7 already has a producer (client 4, lease 9)")
    assert str(taken) == (
        "producer of stream camera/front: REJECTED: stream 7 already has a producer (client 4, lease 9)"
    )
    assert str(AttachRefused("UNSUPPORTED", 7, "CONSUMER", "")) == (
        "consumer of stream 7: UNSUPPORTED: the driver gave no reason"
    )
