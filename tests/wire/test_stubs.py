# SPDX-License-Identifier: Apache-2.0
"""Type stubs: that the checked-in files are those of the schemas."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tensorpool.wire import stubs


def test_the_stubs_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """A changed schema without its stub fails here; `python -m tensorpool.wire.stubs` writes it."""
    assert stubs.main(["--check"]) == 0, capsys.readouterr().err


def test_a_drifted_stub_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check reports and leaves alone; without it the stub is written."""
    monkeypatch.setattr(stubs, "__file__", str(tmp_path / "stubs.py"))
    assert stubs.main([]) == 0
    stale = tmp_path / "control.pyi"
    stale.write_text(stale.read_text("utf-8").replace("stream_id: int", "stream_id: str"), "utf-8")
    before = stale.read_text("utf-8")
    capsys.readouterr()
    assert stubs.main(["--check"]) == 1
    assert "control.pyi is out of date" in capsys.readouterr().err
    assert stale.read_text("utf-8") == before
    assert stubs.main([]) == 0
    assert stubs.main(["--check"]) == 0


@pytest.mark.parametrize("name", stubs.MODULES)
def test_a_stub_names_what_its_module_exports(name: str) -> None:
    """Every public name exists at run time."""
    module = import_module(f"tensorpool.wire.{name}")
    text = stubs.generate(name)
    for public in module.__all__:
        assert hasattr(module, public)
        assert f"class {public}(" in text or f"{public}: Schema" in text
