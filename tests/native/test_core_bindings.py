# SPDX-License-Identifier: Apache-2.0
"""tensorpool._core from Python: what its objects refuse, so that no argument reaches memory that is not theirs."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tensorpool import _core
from tensorpool.errors import Closed, LocalProtocolError
from tests.support.processes import ROOT


def mapping(size: int, *, writable: bool = True) -> _core.Mapping:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="tp-test-") as file:
        os.ftruncate(file.fileno(), size)
        return _core.Mapping(file.fileno(), size, writable=writable)


def ring(nslots: int = 4, stride: int = 64) -> tuple[_core.RingWriter, _core.RingReader, _core.Mapping]:
    header, pool = mapping(64 + nslots * 256), mapping(64 + nslots * stride)
    pools = [(1, stride, pool)]
    return _core.RingWriter(header, pools, nslots), _core.RingReader(header, pools, nslots), pool


LAYOUT = _core.TensorLayout(1, 1, [64])
PAYLOAD = np.arange(64, dtype=np.uint8)


def test_a_frame_of_another_reader_is_refused() -> None:
    """Its offsets mean nothing here: neither copied nor checked, whatever its seq."""
    writer, reader, _ = ring(nslots=1024, stride=4096)
    for seq in range(1024):
        assert writer.write(seq, LAYOUT, PAYLOAD)
    frame = reader.read(1023)
    assert isinstance(frame, _core.SlotFrame)
    _, stranger, _ = ring()
    with pytest.raises(LocalProtocolError, match="another reader"):
        stranger.copy_into(frame, np.empty(64, np.uint8))
    with pytest.raises(LocalProtocolError, match="another reader"):
        stranger.intact(frame)
    with pytest.raises(LocalProtocolError, match="another reader"):
        stranger.kept_view(frame)
    with pytest.raises(LocalProtocolError, match="another reader"):
        stranger.keep_view(frame, PAYLOAD)
    assert reader.intact(frame)
    assert reader.kept_view(frame) is None


@pytest.mark.parametrize("offset", [1, 4, 64, 57, 2**64 - 8, 2**63])
def test_words_outside_the_mapping_are_refused(offset: int) -> None:
    """Atomic access is aligned and inside, also where offset + 8 would wrap."""
    region = mapping(64)
    for access in (region.load_u64, lambda at: region.store_u64(at, 1)):
        with pytest.raises(ValueError, match="offset"):
            access(offset)
    region.store_u64(56, 7)
    assert region.load_u64(56) == 7


@pytest.mark.parametrize("arguments", [(65537, 1), (-1, 1), (1, 65537), (1, -1), (1, 1, 256), (1, 1, -1)])
def test_numbers_that_do_not_fit_a_field_are_refused(arguments: tuple[int, ...]) -> None:
    """They are not cut to the width of the field, which would give them another meaning."""
    dtype, order, *unit = arguments
    with pytest.raises(ValueError, match="numbers of the specification"):
        _core.TensorLayout(dtype, order, [4], progress_unit=unit[0] if unit else 0)


def test_read_only_mappings_give_read_only_views_and_no_writer() -> None:
    """A consumer's memory cannot be written through anything that we hand out."""
    header, pool = mapping(64 + 4 * 256, writable=False), mapping(64 + 4 * 64, writable=False)
    assert memoryview(pool).readonly
    assert not np.frombuffer(pool, np.uint8).flags.writeable
    with pytest.raises(ValueError, match="writable"):
        _core.RingWriter(header, [(1, 64, pool)], 4)
    with pytest.raises(ValueError, match="read-only"):
        pool.store_u64(0, 1)


def test_a_view_keeps_the_memory_after_everything_else_is_gone() -> None:
    """The mapping goes with its last view, not before."""
    writer, reader, pool = ring()
    assert writer.write(0, LAYOUT, PAYLOAD)
    frame = reader.read(0)
    assert isinstance(frame, _core.SlotFrame)
    view = np.ndarray(frame.layout.shape, np.uint8, pool, frame.payload_offset)
    del writer, reader, pool, frame
    gc.collect()
    assert (view == PAYLOAD).all()


@pytest.mark.parametrize("data", [memoryview(bytes(128))[::2], "text", None, np.zeros(63, np.uint8), b""])
def test_a_payload_that_is_not_the_layouts_bytes_is_refused(data: object) -> None:
    """Strided, of another length or no bytes at all: an error, and the slot is untouched."""
    writer, reader, _ = ring()
    with pytest.raises((TypeError, ValueError, BufferError)):
        writer.write(1, LAYOUT, data)  # type: ignore[arg-type]
    assert reader.read(1) is _core.DropReason.STALE


def test_a_writer_does_not_survive_a_fork() -> None:
    """Two processes would write one ring: the child's copy refuses."""
    writer, reader, _ = ring()
    pid = os.fork()
    if pid == 0:
        try:
            writer.write(0, LAYOUT, PAYLOAD)
        except Closed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert writer.write(0, LAYOUT, PAYLOAD)
    assert isinstance(reader.read(0), _core.SlotFrame)


def test_the_stub_is_what_the_build_generates(tmp_path: Path) -> None:
    """src/tensorpool/_core.pyi is up to date; `make stubs` renews it."""
    from nanobind.stubgen import main

    generated = tmp_path / "_core.pyi"
    pattern = ROOT / "native" / "stubs.pattern"
    main(["-q", "-P", "-m", "tensorpool._core", "-p", str(pattern), "-o", str(generated)])
    assert generated.read_text() == (ROOT / "src" / "tensorpool" / "_core.pyi").read_text()
