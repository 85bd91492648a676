# SPDX-License-Identifier: Apache-2.0
"""Full HD at 60 Hz from a file, from ffmpeg and from GStreamer, in real processes: no frame is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tensorpool as tp
from tests.support.processes import Process

SECONDS = 10
FRAMES = 60 * SECONDS
TEST_PICTURE = f"testsrc=size=1920x1080:rate=60:duration={SECONDS}"
BALL = f"videotestsrc num-buffers={FRAMES} pattern=ball ! video/x-raw,format=RGB,width=1920,height=1080,framerate=60/1"


@pytest.fixture
def wide_pool() -> Iterator[tp.Local]:
    """A ring of two seconds."""
    profile = {"header_nslots": 128, "payload_pools": [{"pool_id": 1, "stride_bytes": 1 << 23}]}
    with tp.local(overrides={"profiles.default": profile}) as pool:
        yield pool


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["file", "ffmpeg", "gstreamer"])
def test_full_hd_at_60_hz_without_a_lost_frame(
    ffmpeg: None, gstreamer: None, wide_pool: tp.Local, tmp_path: Path, kind: str
) -> None:
    """Published, received and read to the last byte by another process; nothing dropped, nothing missing."""
    clip = tmp_path / "clip.mp4"
    if kind == "file":
        made = [
            "-f",
            "lavfi",
            "-i",
            TEST_PICTURE,
            "-c:v",
            "libx264",
            "-preset",
            "ultrafast",
            "-pix_fmt",
            "yuv420p",
            str(clip),
        ]
        subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *made], check=True)
    source = {
        "file": ["--ffmpeg", f"-i {clip}"],
        "ffmpeg": ["--ffmpeg", f"-f lavfi -i {TEST_PICTURE}"],
        "gstreamer": ["--gstreamer", BALL],
    }[kind]
    place = {"AERON_DIR": wide_pool.aeron_dir, "SHM_BASE_DIR": wide_pool.config.shm.base_dir}
    ingest = ["-m", "tensorpool", "ingest", "hd", *source, "--wait-for-consumers", "1", "--timeout", "60", "--json"]
    consume = ["-m", "tensorpool", "consume", "hd", "--timeout", "90", "--count", str(FRAMES), "--json"]
    with Process(*ingest, **place) as publishing, Process(*consume, **place) as receiving:
        code, output = receiving.finish()
        assert code == 0, output
        received = msgspec.json.decode(output.splitlines()[-1])
        code, output = publishing.finish()
        assert code == 0, output
        published = msgspec.json.decode(output.splitlines()[-1])
    print(kind, published["rate_hz"], "Hz", published["mib_per_s"], "MiB/s")
    assert (published["published"], published["dropped"], published["missing"]) == (FRAMES, {}, 0)
    assert (received["received"], received["lost"]) == (FRAMES, 0)
