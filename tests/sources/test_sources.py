# SPDX-License-Identifier: Apache-2.0
"""Each source against what another program makes of the same thing: every frame, byte for byte, with its metadata."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image

import tensorpool as tp
from tensorpool.errors import MissingExtra, TensorPoolError
from tensorpool.extras import library, program
from tensorpool.shm import PoolSpec, RingSpec
from tensorpool.sources import (
    FfmpegSource,
    GStreamerSource,
    ImageSource,
    Ingest,
    NpySource,
    OpenCvSource,
    SourceFailed,
    SourceFrame,
)
from tensorpool.sources.ffmpeg import probe
from tensorpool.sources.opencv import camera_serial
from tensorpool.sources.source_clock import DRIFT_PPM, LEAP_NS
from tests.sources.receiving import spacing_ms, through


def lavfi(frames: int, rate: int = 50, size: str = "64x48", more: str = "") -> list[str]:
    return ["-f", "lavfi", "-i", f"testsrc=size={size}:rate={rate}:duration={frames / rate}{more}"]


def raw_by_ffmpeg(arguments: list[str], pixel_format: str, path: Path) -> bytes:
    """What ffmpeg itself writes to a file."""
    output = ["-pix_fmt", pixel_format, "-fps_mode", "passthrough", "-f", "rawvideo", str(path)]
    subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *arguments, *output], check=True)
    return path.read_bytes()


def joined(arrays: list[npt.NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize(("pixel_format", "shape"), [(None, (48, 64, 3)), ("gray16le", (48, 64)), ("nv12", (72, 64))])
def test_ffmpeg_gives_its_frames_at_their_times(
    ffmpeg: None, client: tp.Client, tmp_path: Path, pixel_format: str | None, shape: tuple[int, ...]
) -> None:
    """Shape and pixel format are found out; bytes are ffmpeg's own; nothing is lost; a file is played at its pace."""
    arguments = lavfi(12)
    got = through(client, f"ffmpeg/{pixel_format}", FfmpegSource(arguments, pixel_format=pixel_format))
    assert joined(got.arrays) == raw_by_ffmpeg(arguments, pixel_format or "rgb24", tmp_path / "raw")
    assert {array.shape for array in got.arrays} == {shape}
    assert (len(got.arrays), got.lost, got.totals.missing, got.totals.dropped) == (12, 0, 0, {})
    assert got.metadata["pixel_format"] == (pixel_format or "rgb24")
    assert got.metadata["rate_hz"] == 50.0
    assert got.metadata["source"].startswith("ffmpeg -f lavfi")
    assert spacing_ms(got) >= 0.9 * 20  # never faster than the file


def test_a_live_source_of_ffmpeg_is_opened_again(ffmpeg: None, client: tp.Client) -> None:
    """When it ends; with -re it is live, without not."""
    source = FfmpegSource(["-re", *lavfi(5)])
    assert source.is_live
    got = through(client, "ffmpeg/live", source, count=8)
    assert (len(got.arrays), got.totals.reconnects) == (8, 1)
    assert np.array_equal(got.arrays[0], got.arrays[5])
    assert (np.diff(got.stamps) > 0).all()
    assert not FfmpegSource(lavfi(5)).is_live


def test_frames_that_ffmpeg_left_out_are_counted(ffmpeg: None, client: tp.Client) -> None:
    """A filter that drops three of twelve frames leaves gaps in their times."""
    arguments = [*lavfi(12), "-vf", r"select=not(between(n\,4\,5))*not(eq(n\,8))"]
    got = through(client, "ffmpeg/missing", FfmpegSource(arguments), rate_hz=0)
    assert (len(got.arrays), got.totals.missing) == (9, 3)


def test_what_ffmpeg_says_is_in_the_error(ffmpeg: None, client: tp.Client, tmp_path: Path) -> None:
    """A file that is no video, arguments without an input."""
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(SourceFailed, match=r"ffmpeg cannot read it: .*Invalid data"):
        through(client, "ffmpeg/wrong", FfmpegSource(["-i", str(tmp_path / "text.mp4")]))
    with pytest.raises(tp.ConfigError, match="-i FILE"):
        FfmpegSource(["-f", "v4l2"])
    with pytest.raises(tp.ConfigError, match="one of gray, gray16le"):
        FfmpegSource(["-i", "x"], pixel_format="rgb")
    assert probe(lavfi(1)).pixel_format == "rgb24"


@pytest.mark.parametrize("width", [64, 61])
def test_gstreamer_gives_its_buffers_without_their_padding(
    gstreamer: None, client: tp.Client, tmp_path: Path, width: int
) -> None:
    """Caps and times are GStreamer's; rows of an odd width lose the bytes that it pads them with."""
    caps = f"video/x-raw,format=RGB,width={width},height=48,framerate=50/1"
    pipeline = f"videotestsrc num-buffers=9 pattern=ball ! {caps}"
    got = through(client, f"gst/{width}", GStreamerSource(pipeline), rate_hz=0)
    file = tmp_path / "raw"
    subprocess.run(
        ["gst-launch-1.0", "-q", *pipeline.split(), "!", "filesink", f"location={file}"], check=True, timeout=60
    )
    padded = -(-width * 3 // 4) * 4
    expected = np.frombuffer(file.read_bytes(), np.uint8).reshape(9, 48, padded)[:, :, : width * 3]
    assert np.array_equal(np.stack(got.arrays), expected.reshape(9, 48, width, 3))
    assert (got.metadata["pixel_format"], got.metadata["rate_hz"]) == ("rgb24", 50.0)
    assert (got.lost, got.totals.missing) == (0, 0)


def test_a_live_pipeline_is_known_as_one_and_keeps_its_times(gstreamer: None, client: tp.Client) -> None:
    """GStreamer says that it is live; gray stays gray."""
    source = GStreamerSource("videotestsrc is-live=true ! video/x-raw,format=GRAY8,width=64,height=48,framerate=50/1")
    got = through(client, "gst/live", source, count=6)
    assert source.is_live
    assert {array.shape for array in got.arrays} == {(48, 64)}
    assert (np.diff(got.stamps) > 0).all()


def test_what_gstreamer_says_is_in_the_error(gstreamer: None, client: tp.Client) -> None:
    """A pipeline that does not exist."""
    with pytest.raises(SourceFailed, match='no element "nothingsrc"'):
        through(client, "gst/wrong", GStreamerSource("nothingsrc"))


def test_opencv_decodes_into_the_stream(ffmpeg: None, client: tp.Client, tmp_path: Path) -> None:
    """Every frame is what OpenCV's own reader gives, in its order of channels."""
    path = tmp_path / "clip.mkv"
    coded = ["-c:v", "ffv1", str(path)]
    subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *lavfi(7), *coded], check=True, timeout=60)
    got = through(client, "opencv/file", OpenCvSource(str(path)))
    capture = cv2.VideoCapture(str(path))
    expected = [capture.read()[1] for _ in range(7)]
    capture.release()
    assert np.array_equal(np.stack(got.arrays), np.stack(expected))
    assert (got.metadata["pixel_format"], got.metadata["rate_hz"]) == ("bgr24", 50.0)
    with pytest.raises(SourceFailed, match="cannot open"):
        next(iter(OpenCvSource(str(tmp_path / "nothing.mkv")).frames()))


def test_the_serial_number_of_a_camera_is_found(tmp_path: Path) -> None:
    """It stands beside the USB device whose interface the camera is; files and URLs have none."""
    interface = tmp_path / "devices" / "1-1" / "1-1:1.0"
    interface.mkdir(parents=True)
    (interface.parent / "serial").write_text("SN-0042\n")
    (tmp_path / "video3").mkdir()
    (tmp_path / "video3" / "device").symlink_to(interface)
    assert camera_serial(3, tmp_path) == "SN-0042"
    assert camera_serial("/dev/video3", tmp_path) == "SN-0042"
    assert camera_serial("rtsp://host/video3.mp4", tmp_path) is None
    assert camera_serial(4, tmp_path) is None


def test_pictures_come_in_the_order_of_their_numbers(client: tp.Client, tmp_path: Path) -> None:
    """2 before 10; 16-bit PNG and TIFF keep their depth; pictures of several sizes are frames of several sizes."""
    arrays: list[npt.NDArray[Any]] = [
        np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
        np.arange(30, dtype=np.uint16).reshape(5, 6) * 2000,
        np.arange(12, dtype=np.uint8).reshape(3, 4),
    ]
    Image.fromarray(arrays[0]).save(tmp_path / "shot-2.png")
    tifffile.imwrite(tmp_path / "shot-9.tif", arrays[1])
    Image.fromarray(arrays[2]).save(tmp_path / "shot-10.png")
    got = through(client, "images", ImageSource(str(tmp_path / "shot-*")), rate_hz=0)
    assert len(got.arrays) == 3
    assert all(np.array_equal(one, other) for one, other in zip(got.arrays, arrays, strict=True))
    assert got.metadata["pixel_format"] == "gray"
    with pytest.raises(tp.ConfigError, match="matches files"):
        ImageSource(str(tmp_path / "*.jpg"))


def test_arrays_of_numpy_come_one_by_one_or_stacked(client: tp.Client, tmp_path: Path) -> None:
    """Of any dtype and number of dimensions."""
    stack = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
    np.save(tmp_path / "stack.npy", stack)
    got = through(client, "npy/stacked", NpySource(str(tmp_path / "stack.npy"), is_stacked=True), rate_hz=0)
    assert np.array_equal(np.stack(got.arrays), stack)
    whole = through(client, "npy/whole", NpySource(str(tmp_path / "*.npy")), rate_hz=0)
    assert np.array_equal(whole.arrays[0], stack)


class Flaky:
    """A camera that goes away after three frames, and does not open the second time."""

    is_live = True
    about: ClassVar = {"camera_serial": "SN-1"}

    def __init__(self) -> None:
        self.opened = 0

    def frames(self) -> Iterator[SourceFrame | None]:
        self.opened += 1
        if self.opened == 2:
            raise OSError("unplugged")
        for number in range(3):
            yield None
            yield SourceFrame.of(np.full((4, 4), number, np.uint8), time_ns=number * 10_000_000)
        raise SourceFailed("the cable")


def test_a_camera_that_goes_away_is_opened_again(client: tp.Client) -> None:
    """After longer and longer pauses; each problem is reported with what comes next."""
    problems: list[str] = []
    camera = Flaky()
    got = through(client, "flaky", camera, count=6, on_problem=problems.append)
    assert [int(array[0, 0]) for array in got.arrays] == [0, 1, 2, 0, 1, 2]
    assert (camera.opened, got.totals.reconnects, got.metadata) == (3, 2, {"camera_serial": "SN-1"})
    assert problems == ["the cable; opening it again in 0.5 s", "unplugged; opening it again in 1 s"]


class Late:
    """A camera whose frames are captured 1 ms apart and arrive 20 ms apart. The second begins a new offset."""

    is_live = True
    about: ClassVar = {"camera_serial": "SN-2"}
    took_ns = 0

    def frames(self) -> Iterator[SourceFrame]:
        yield SourceFrame.of(np.zeros((4, 4), np.uint8), time_ns=0)
        begin_ns = time.monotonic_ns()
        for number in range(5):
            yield SourceFrame.of(np.zeros((4, 4), np.uint8), time_ns=3600 * 10**9 + number * 1_000_000)
            time.sleep(0.02)
        self.took_ns = time.monotonic_ns() - begin_ns


def test_stamps_of_a_live_camera_are_its_own_and_not_those_of_the_arrival(client: tp.Client) -> None:
    """They keep its spacing, but for the drift that is allowed."""
    camera = Late()
    got = through(client, "late", camera, count=7)  # the seventh is of the next opening
    while not 0 < camera.took_ns < LEAP_NS // 2:  # the machine stood still: the clock began anew, as it should
        camera = Late()
        got = through(client, "late", camera, count=7)
    steps_ns = np.diff(got.stamps[1:6])
    assert (steps_ns >= 1_000_000).all()
    assert steps_ns.sum() <= 4_000_000 + camera.took_ns * DRIFT_PPM // 1_000_000


def test_the_ring_fits_the_frames_also_those_that_are_larger_than_the_first(client: tp.Client, tmp_path: Path) -> None:
    """Two seconds of them; the consumer follows to the larger ring, and nothing is lost or counted twice."""
    arrays = [np.full(shape, number, np.uint8) for number, shape in enumerate([(4, 4), (4, 5), (300, 500), (2, 2)])]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    got = through(client, "growing", NpySource(str(tmp_path / "*.npy"), rate_hz=20))
    assert [array.tolist() for array in got.arrays] == [array.tolist() for array in arrays]
    assert (got.lost, got.totals.published, got.totals.bytes) == (0, 4, sum(array.nbytes for array in arrays))
    with client.watch("growing", timeout=60) as watch:
        assert watch.epochs[-1].regions.ring == RingSpec(64, (PoolSpec(1, 1 << 18),))


def test_a_frame_that_fits_no_pool_is_refused_with_sizes(client: tp.Client, tmp_path: Path) -> None:
    """Of a stream that it may not create: before anything is published."""
    np.save(tmp_path / "large.npy", np.zeros((300, 500), np.uint8))
    client.producer("large", create=True).close()
    with (
        Ingest(client, "large", NpySource(str(tmp_path / "large.npy")), create=False) as ingest,
        pytest.raises(tp.FrameTooLarge, match=r"150000 bytes fits no pool of .*large.*: the largest holds 131072"),
    ):
        ingest.run(lambda: True)
    assert ingest.totals.published == 0


def test_what_is_not_installed_is_named() -> None:
    """A library by its extra, a program by its package; a library whose own import fails is not called missing."""
    with pytest.raises(MissingExtra, match=r'reading needs nothing_here.*: pip install "aeron-tensorpool\[ingest\]"'):
        library("nothing_here.part", "reading", "ingest")
    with pytest.raises(TensorPoolError, match="apt-get install nothing-tools"):
        program("nothing-here", "this source", "nothing-tools")
