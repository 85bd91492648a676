# SPDX-License-Identifier: Apache-2.0
"""Which copies a process uses: measured once, kept in a file that may be damaged, fixed by the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool import _core
from tensorpool.errors import ConfigError
from tensorpool.shm import copies

pytestmark = pytest.mark.skipif(not copies.has_choice(), reason="this processor has one kind of copy")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The calibration's place; this process chooses anew, and again after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(copies.VARIABLE)
    monkeypatch.setattr(copies, "_origin", None)
    yield copies.cache_file()
    _core.reset_copy_kinds()


def choose_again(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(copies, "_origin", None)
    return copies.choose_copies()


def test_the_first_process_measures_and_the_next_reads_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured twice, and both use the same copies."""
    assert copies.choose_copies() == f"measured, kept in {file}"
    kept, used = json.loads(file.read_bytes()), _core.copy_kinds()
    assert kept == {"processor": _core.processor(), "kinds": used}
    monkeypatch.setattr(_core, "calibrate_copies", None)  # a call would fail
    other = next(kind for kind in _core.copy_candidates("stream") if kind != used["stream"])
    file.write_text(json.dumps(kept | {"kinds": used | {"stream": other}}))
    assert choose_again(monkeypatch) == f"measured, kept in {file}"
    assert _core.copy_kinds() == used | {"stream": other}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"processor": 1, "kinds": {}}',
        b'{"processor": "PROCESSOR", "kinds": {}}',
        b'{"processor": "PROCESSOR", "kinds": KINDS, "more": 1}',
        b'{"processor": "another", "kinds": KINDS}',
        b'{"processor": "PROCESSOR", "kinds": BAD}',
    ],
)
def test_a_damaged_file_and_one_of_another_processor_are_made_anew(
    file: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is applied, and afterwards it is whole."""
    kinds = _core.copy_kinds()
    words = {"PROCESSOR": _core.processor(), "KINDS": json.dumps(kinds), "BAD": json.dumps(kinds | {"write": "stream"})}
    for name, value in words.items():
        text = text.replace(name.encode(), value.encode())
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    measured = kinds | {"read-small": "libc"}
    monkeypatch.setattr(_core, "calibrate_copies", lambda budget_ns: measured)
    assert copies.choose_copies() == f"measured, kept in {file}"
    assert json.loads(file.read_bytes()) == {"processor": _core.processor(), "kinds": measured}
    assert _core.copy_kinds() == measured


def test_a_file_that_cannot_be_written_is_done_without(file: Path) -> None:
    """The process measures for itself and works."""
    file.parent.parent.write_text("a file where the directory should be")
    assert copies.choose_copies() == f"measured by this process; {file} cannot be written"


def test_who_only_looks_writes_nothing(file: Path) -> None:
    """As `tensorpool doctor` does."""
    assert "measured now" in copies.choose_copies(keep=False)
    assert not file.parent.exists()


def test_processes_that_start_at_once_leave_one_whole_file(file: Path) -> None:
    """Each renames a whole file into place; none is left half done."""
    code = "from tensorpool.shm import copies; print(copies.choose_copies())"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in running]
    assert said == [f"measured, kept in {file}"] * 4
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert json.loads(file.read_bytes())["processor"] == _core.processor()


def test_threads_that_start_at_once_choose_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first."""
    calls: list[int] = []
    measure = _core.calibrate_copies
    monkeypatch.setattr(_core, "calibrate_copies", lambda budget_ns: (calls.append(budget_ns), measure(budget_ns))[1])
    threads = [threading.Thread(target=copies.choose_copies, kwargs={"keep": False}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [copies.BUDGET_NS]


def test_the_variable_fixes_one_kind_or_single_uses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not name is as the processor's default; the file is neither read nor written."""
    default = _core.copy_kinds()
    monkeypatch.setenv(copies.VARIABLE, "libc")
    assert choose_again(monkeypatch) == "TENSORPOOL_COPY=libc"
    assert set(_core.copy_kinds().values()) == {"libc"}
    monkeypatch.setenv(copies.VARIABLE, "read-medium=libc,stream=stream-sse2")
    choose_again(monkeypatch)
    assert _core.copy_kinds() == default | {"read-medium": "libc", "stream": "stream-sse2"}
    monkeypatch.setenv(copies.VARIABLE, "processor")
    choose_again(monkeypatch)
    assert _core.copy_kinds() == default
    assert not file.exists()


@pytest.mark.parametrize(
    "wish", ["fast", "libc,avx2", "read-medium=", "write=stream-sse2", "reading=libc", "stream=libc,stream=libc", "="]
)
def test_a_wish_that_cannot_be_met_is_refused_with_what_can(
    file: Path, wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing falls back in silence."""
    monkeypatch.setenv(copies.VARIABLE, wish)
    with pytest.raises(ConfigError, match=r"TENSORPOOL_COPY = .* accepted: auto, processor, one of .*libc"):
        copies.choose_copies()


def test_a_measurement_is_bounded() -> None:
    """Without time it returns the defaults."""
    _core.reset_copy_kinds()
    assert _core.calibrate_copies(0) == _core.copy_kinds()
    with pytest.raises(ValueError, match="cannot be used for write"):
        _core.set_copy_kind("write", "stream-sse2")
    with pytest.raises(ValueError, match="no use is called"):
        _core.set_copy_kind("reading", "libc")
