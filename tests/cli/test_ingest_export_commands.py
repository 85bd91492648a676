# SPDX-License-Identifier: Apache-2.0
"""`tensorpool ingest`, `export` and `import` as a user types them, from a video to files and back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tests.cli.conftest import Shell
from tests.support.frame_rows import make_lake, rows_over_time, source
from tests.support.programs import need

LAVFI = "-f lavfi -i testsrc=size=64x48:rate=50:duration=0.4"


def export_live(shell: Shell, stream: str, out: Path, *more: str) -> dict[str, object]:
    code, output = shell.run_here("export", stream, str(out), "--count", "20", "--timeout", "90", "--json", *more)
    assert code == 0, output
    summary: dict[str, object] = msgspec.json.decode(output.splitlines()[-1])
    return summary


def test_a_video_becomes_a_stream_becomes_a_file_becomes_a_stream(shell: Shell, tmp_path: Path) -> None:
    """Every frame of it, through `ingest`, `export` of a live stream to MCAP, `import`, and `export` to NPY."""
    need("ffmpeg")
    with shell.start("ingest", "cli/video", "--ffmpeg", LAVFI, "--wait-for-consumers", "1", "--json") as ingest:
        exported = export_live(shell, "cli/video", tmp_path / "video.mcap")
        code, output = ingest.finish()
    assert code == 0, output
    summary = msgspec.json.decode(output.splitlines()[-1])
    assert (summary["published"], summary["dropped"], summary["missing"], summary["reconnects"]) == (20, {}, 0, 0)
    assert (summary["about"]["pixel_format"], summary["about"]["rate_hz"]) == ("rgb24", 50.0)
    assert (exported["frames"], exported["is_complete"], exported["missing"]) == (20, True, [])
    with shell.start("import", str(tmp_path / "video.mcap"), "cli/again", "--wait-for-consumers", "1") as imported:
        export_live(shell, "cli/again", tmp_path / "frames", "--format", "npy")
        code, output = imported.finish()
    assert code == 0, output
    assert "published 20 frames" in output
    assert 'publishing stream "cli/again"' in output
    frames = np.stack([np.load(path) for path in sorted((tmp_path / "frames").iterdir())])
    assert frames.shape == (20, 48, 64, 3)
    assert len({frame.tobytes() for frame in frames}) == 20


def test_a_lake_is_exported_by_seq_and_a_second_run_says_so(shell: Shell, tmp_path: Path) -> None:
    """As text; and what is wrong on the command line is refused before anything is written."""
    make_lake(tmp_path / "lake", rows_over_time(30), metadata=[source(10_000, "camera/front")])
    command = ["export", str(tmp_path / "lake"), str(tmp_path / "part"), "--format", "tiff", "--from", "5", "--to", "9"]
    code, output = shell.run_here(*command)
    assert code == 0, output
    assert output.splitlines()[-1] == f"wrote {tmp_path / 'part'}: 4 frames, 0 missing"
    assert len(list((tmp_path / "part").iterdir())) == 4
    code, output = shell.run_here(*command)
    assert (code, output) == (0, f"{tmp_path / 'part'} is complete already: 4 frames, 0 missing\n")
    for arguments, text in (
        (["export", str(tmp_path / "lake"), str(tmp_path / "x")], "--format = 'x' is not usable"),
        (["export", str(tmp_path / "lake"), str(tmp_path / "x.h5"), "--stream", "other"], "has no stream 'other'"),
        (["export", str(tmp_path), str(tmp_path / "x.h5")], "a lake for --stream"),
        (["export", str(tmp_path / "lake"), str(tmp_path / "x.h5"), "--from", "noon"], "a time in ISO 8601"),
        (["ingest", "cli/none"], "give one of --opencv"),
        (["ingest", "cli/none", "--npy", "x", "--pixel-format", "gray"], "--pixel-format goes with"),
        (["ingest", "cli/none", "--npy", str(tmp_path / "*.npy")], "matches files"),
    ):
        code, output = shell.run_here(*arguments)
        assert code != 0
        assert text in output
    assert not list(tmp_path.glob("x*"))
