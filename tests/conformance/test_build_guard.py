# SPDX-License-Identifier: Apache-2.0
"""The native core does not build where its layout would be read wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT


def compiles(header: Path) -> tuple[bool, str]:
    outcome = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", str(header)], capture_output=True, text=True, check=False
    )
    return outcome.returncode == 0, outcome.stderr


@pytest.mark.spec("WIRE-15.1-11")
def test_a_host_of_the_other_byte_order_is_refused_at_build_time(tmp_path: Path) -> None:
    """Where the host's order is not the regions' order the build fails and says why."""
    layout = (ROOT / "native" / "layout.hpp").read_text()
    assert layout.count("std::endian::little") == 1
    header = tmp_path / "layout.hpp"
    header.write_text(layout)
    assert compiles(header)[0]
    header.write_text(layout.replace("std::endian::little", "std::endian::big"))
    built, words = compiles(header)
    assert not built
    assert "regions are little-endian; this host is not" in words
