# SPDX-License-Identifier: Apache-2.0
"""`driver --check` says which rings go round through memory instead of the cache, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from tensorpool._core import last_level_cache_bytes
from tensorpool.cli.main import group

STRIDE_BYTES = 1 << 20
BEYOND = 1 << (last_level_cache_bytes() // STRIDE_BYTES).bit_length()  # slots


def check(folder: Path, *more: str) -> str:
    file = folder / "driver.toml"
    profiles = "".join(
        f"[profiles.{name}]\nheader_nslots = {nslots}\n"
        f"payload_pools = [{{pool_id = 1, stride_bytes = {STRIDE_BYTES}}}]\n"
        for name, nslots in (("short", 4), ("long", BEYOND))
    )
    streams = '[streams.near]\nstream_id = 1\nprofile = "short"\n[streams.far]\nstream_id = 2\nprofile = "long"\n'
    policies = '[policies]\nallow_dynamic_streams = false\ndefault_profile = "short"\n'
    file.write_text(f'[shm]\nbase_dir = "{folder}/regions"\n{policies}{profiles}{streams}')
    result = CliRunner().invoke(group, ["driver", "--config", str(file), "--check", *more])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_ring_that_exceeds_the_last_level_cache_is_named(tmp_path: Path) -> None:
    """And only that one, with what it costs and which key changes it."""
    (note,) = [line for line in check(tmp_path).splitlines() if "last-level cache" in line]
    assert "): far: a slot has left the cache" in note
    assert "header_nslots" in note
    assert json.loads(check(tmp_path, "--json"))["last_level_cache_bytes"] == last_level_cache_bytes()
