# SPDX-License-Identifier: Apache-2.0
"""Every format read back by another library: all frames, byte for byte where it is lossless, and what is missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
import tifffile
import zarr
from mcap.reader import make_reader
from PIL import ExifTags, Image

import tensorpool as tp
from tensorpool import pixel_formats, ros_image
from tensorpool.errors import ConfigError
from tensorpool.exports.frames import LakeFrames
from tensorpool.exports.hdf5 import hdf5
from tensorpool.exports.job import ExportJob, Outcome, Request, format_of
from tensorpool.exports.mcap import McapExport
from tensorpool.exports.mp4 import Mp4Export
from tensorpool.exports.protocol import ExportFrame, ExportRefused, Missing, Written
from tests.exports.conftest import SEQS, START, picture, rows
from tests.exports.foxglove import raw_image_class
from tests.support.frame_rows import make_lake

START_NS = round(START.timestamp()) * 1_000_000_000
GAP = Missing(1, 40, 44, "OVERWRITTEN")


def export(lake: Path, out: Path, kind: str, *, until: int | None = None, **bounds: Any) -> Outcome:
    """As the command does it; `until` stops it after so many frames of this run."""
    stream = next(iter(tp.open(lake).values()))
    begin, end = (None if bounds.get(name) is None else str(bounds[name]) for name in ("begin", "end"))
    job = ExportJob(out, Request(str(lake), "camera/front", kind, begin, end))
    done: list[int] = []
    complete = job.complete()
    if complete is not None:
        return complete
    part = stream[bounds.get("begin") : bounds.get("end")]
    return job.run(LakeFrames(part), lambda: until is None or len(done) < until, lambda at, nbytes: done.append(at))


def read(out: Path, kind: str) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Seqs and frames by a library that is not ours; pictures that it shows as RGB as the camera gave them: BGR."""
    if kind == "hdf5":
        with h5py.File(out) as file:
            return list(file["seq"][:]), file["frames"][:]
    if kind == "zarr":
        group = zarr.open_group(str(out), mode="r")
        return [int(seq) for seq in group["seq"][:]], group["frames"][:]  # type: ignore[index, union-attr, return-value]
    if kind == "mcap":
        with out.open("rb") as file:
            messages = [message for _, _, message in make_reader(file).iter_messages(topics=["/camera/front"])]
        return [message.sequence for message in messages], np.stack([by_hand(message.data) for message in messages])
    if kind == "foxglove":
        with out.open("rb") as file:
            found = [(schema, message) for schema, _, message in make_reader(file).iter_messages()]
        return [message.sequence for _, message in found], np.stack([by_protobuf(*one) for one in found])
    files = sorted(out.iterdir())
    readers: dict[str, Callable[[Path], np.ndarray[Any, Any]]] = {
        "png": lambda path: np.asarray(Image.open(path))[:, :, ::-1],
        "tiff": lambda path: tifffile.imread(path)[:, :, ::-1],
        "npy": np.load,
    }
    return [int(path.stem.split("-")[1]) for path in files], np.stack([readers[kind](path) for path in files])


def by_hand(data: bytes) -> np.ndarray[Any, Any]:
    """sensor_msgs/msg/Image of bgr8 24x32, without our decoder: the pixels are its last bytes."""
    assert b"bgr8\0" in data
    assert data[4:12] != bytes(8)
    return np.frombuffer(data[-24 * 32 * 3 :], np.uint8).reshape(24, 32, 3)


def by_protobuf(schema: Any, message: Any) -> np.ndarray[Any, Any]:
    """foxglove.RawImage of bgr8, read by Google's library with the schema of the file."""
    assert (schema.name, schema.encoding) == ("foxglove.RawImage", "protobuf")
    image = raw_image_class(schema.data).FromString(message.data)
    assert (image.encoding, image.step, image.frame_id) == ("bgr8", 32 * 3, "camera/front")
    assert image.timestamp.seconds * 1_000_000_000 + image.timestamp.nanos == message.log_time
    return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)


LOSSLESS = ["png", "tiff", "npy", "zarr", "hdf5", "mcap", "foxglove"]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_other_libraries_read_every_frame_also_after_an_interruption(lake: Path, tmp_path: Path, kind: str) -> None:
    """Stopped after seven frames nothing is there under the final name; the same export continues, and then says so."""
    out = tmp_path / "out"
    first = export(lake, out, kind, until=7)
    assert (first.is_complete, first.frames, first.resumed, out.exists()) == (False, 7, 0, False)
    second = export(lake, out, kind)
    assert (second.is_complete, second.frames, second.resumed, second.missing) == (True, 46, 7, [GAP])
    seqs, frames = read(out, kind)
    assert seqs == SEQS
    assert np.array_equal(frames, np.stack([picture(seq) for seq in SEQS]))
    third = export(lake, out, kind)
    assert (third.is_complete, third.frames, third.resumed) == (True, 46, 46)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake", "out", "out.export.json"]
    described = msgspec.json.decode((tmp_path / "out.export.json").read_bytes())
    assert described["missing"] == [{"epoch": 1, "lo": 40, "hi": 44, "reason": "OVERWRITTEN"}]


def test_gaps_and_times_are_in_the_formats_own_attributes(lake: Path, tmp_path: Path) -> None:
    """Of HDF5, Zarr, MCAP and TIFF."""
    for kind in ("hdf5", "zarr", "mcap", "tiff"):
        export(lake, tmp_path / kind, kind)
    gap = {"epoch": 1, "lo": 40, "hi": 44, "reason": "OVERWRITTEN"}
    with h5py.File(tmp_path / "hdf5") as file:
        described = msgspec.json.decode(file.attrs["tensorpool"])
        assert (described["missing"], described["stream"], described["frames"]) == ([gap], "camera/front", 46)
        assert file["time_ns"][44] == START_NS + 48 * 50_000_000
        assert set(file["epoch"][:]) == {1}
    attributes = zarr.open_group(str(tmp_path / "zarr"), mode="r").attrs
    assert msgspec.json.decode(str(attributes["tensorpool"]))["missing"] == [gap]
    with (tmp_path / "mcap").open("rb") as file:
        reader = make_reader(file)
        (metadata,) = list(reader.iter_metadata())
        schema, channel, message = next(iter(reader.iter_messages()))
    assert msgspec.json.decode(metadata.metadata["missing"]) == [gap]
    assert schema is not None
    assert (schema.name, schema.encoding) == ("sensor_msgs/msg/Image", "ros2msg")
    assert (channel.message_encoding, message.log_time) == ("cdr", START_NS)
    with Image.open(tmp_path / "tiff" / "1-0000000044.tif") as tiff:
        described = msgspec.json.decode(tiff.getexif()[ExifTags.Base.ImageDescription])
    assert (described["seq"], described["time_ns"]) == (44, START_NS + 44 * 50_000_000)


def test_a_video_has_every_frame_once_also_after_an_interruption(ffmpeg: None, lake: Path, tmp_path: Path) -> None:
    """ffprobe counts them, at the rate of the recording; colours come out as the camera saw them."""
    flat = {seq: np.full((24, 32, 3), (200, 100, 50), np.uint8) for seq in range(9)}  # bgr
    make_lake(tmp_path / "flat", rows(flat))
    out = tmp_path / "out.mp4"
    export(lake, out, "mp4", until=7)
    assert not out.exists()
    assert export(lake, out, "mp4").resumed == 7
    asked = ["ffprobe", "-v", "error", "-count_frames", "-show_entries"]
    fields = "stream=nb_read_frames,width,height,r_frame_rate:format_tags=comment"
    found = subprocess.run([*asked, fields, "-of", "json", str(out)], capture_output=True, check=True)
    described = msgspec.json.decode(found.stdout)
    stream = described["streams"][0]
    assert (stream["nb_read_frames"], stream["width"], stream["height"]) == ("46", 32, 24)
    assert stream["r_frame_rate"] == "20/1"
    assert msgspec.json.decode(described["format"]["tags"]["comment"])["missing"][0]["lo"] == 40
    encoder = Mp4Export(tmp_path / "flat.partial", 20.0)
    assert encoder.resume() == Written()
    for seq, array in flat.items():
        encoder.add(ExportFrame(1, seq, None, None, array, "bgr24"))
    whole = encoder.finish([], {})
    raw = subprocess.run(
        ["ffmpeg", "-v", "error", "-i", str(whole), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    color = np.frombuffer(raw.stdout, np.uint8).reshape(9, 24, 32, 3).mean(axis=(0, 1, 2))
    assert np.abs(color - (50, 100, 200)).max() < 8


def test_a_part_by_seq_and_by_time(lake: Path, tmp_path: Path) -> None:
    """From is part of it, to is not; a gap outside is not noted."""
    assert export(lake, tmp_path / "seqs", "npy", begin=10, end=20).frames == 10
    by_time = export(lake, tmp_path / "times", "npy", begin="2026-11-16T10:00:02Z", end="2026-11-16T10:00:02.500Z")
    assert (by_time.frames, read(tmp_path / "times", "npy")[0]) == (6, [44, 45, 46, 47, 48, 49])


def test_a_target_that_holds_something_else_is_refused(lake: Path, tmp_path: Path) -> None:
    """A file of the user's own, and an export of another part."""
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ExportRefused, match="is there already, and no export of ours"):
        export(lake, tmp_path / "mine", "hdf5")
    export(lake, tmp_path / "out", "npy", begin=0, end=3)
    with pytest.raises(ExportRefused, match=r"export of something else, .*choose another name, or remove it"):
        export(lake, tmp_path / "out", "npy", begin=0, end=4)
    assert (tmp_path / "mine").read_text() == "precious"
    with pytest.raises(ConfigError, match=r"or a name such as out\.mp4"):
        format_of(tmp_path / "out.avi", None)


def test_what_a_format_cannot_hold_is_refused_with_what_can(tmp_path: Path) -> None:
    """Frames that change their shape, floats as PNG; what was written before stays."""
    shapes = {0: np.zeros((4, 4), np.float32), 1: np.zeros((4, 5), np.float32)}
    make_lake(tmp_path / "lake", rows(shapes))
    with pytest.raises(ExportRefused, match="export it as npy, zarr or hdf5"):
        export(tmp_path / "lake", tmp_path / "png", "png")
    with pytest.raises(ExportRefused, match=r"frame 1 is float32 \(4, 5\), those before are float32 \(4, 4\)"):
        export(tmp_path / "lake", tmp_path / "h5", "hdf5")
    assert not (tmp_path / "h5").exists()
    assert export(tmp_path / "lake", tmp_path / "npy", "npy").frames == 2


def test_a_file_of_hdf5_that_a_killed_run_left_is_begun_anew(tmp_path: Path) -> None:
    """Its own mark says that it was being written."""
    path = tmp_path / "out.partial"
    running = hdf5(path)
    running.resume()
    for seq in range(40):
        running.add(ExportFrame(1, seq, None, None, picture(seq), None))
    left = path.read_bytes()  # as a kill leaves it
    running.suspend()
    path.write_bytes(left)
    again = hdf5(path)
    assert again.resume() == Written()
    again.suspend()


def test_an_mcap_that_a_killed_run_left_is_continued(tmp_path: Path) -> None:
    """Cut in the middle, it keeps the messages of its whole chunks; the others are written again."""
    pictures = [np.random.default_rng(seq).integers(0, 255, (400, 500), np.uint8) for seq in range(20)]
    frames = [ExportFrame(7, seq, None, seq, array, "gray") for seq, array in enumerate(pictures)]
    path = tmp_path / "out"
    running = McapExport(path, "/camera")
    running.resume()
    for frame in frames[:16]:
        running.add(frame)
    running.suspend()
    path.write_bytes(path.read_bytes()[: 11 * 200_000])  # as a kill leaves it
    again = McapExport(path, "/camera")
    found = again.resume()
    assert 0 < found.frames < 11
    assert found.position == (7, found.frames - 1)
    for frame in frames[found.frames :]:
        again.add(frame)
    again.finish([], {})
    with path.open("rb") as file:
        messages = [message for _, _, message in make_reader(file).iter_messages()]
    assert [message.sequence for message in messages] == list(range(20))
    for message, picture_ in zip(messages, pictures, strict=True):
        assert message.data.endswith(picture_.tobytes())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("dtype", "shape", "stated", "encoding"),
    [
        ("uint8", (5, 7), None, "mono8"),
        ("uint16", (5, 7), None, "mono16"),
        ("uint8", (5, 7, 3), "bgr24", "bgr8"),
        ("uint16", (5, 7, 4), None, "rgba16"),
        ("uint8", (5, 7), "bayer_rggb8", "bayer_rggb8"),
        ("float32", (5, 7), None, "32FC1"),
        ("int16", (5, 7, 2), None, "16SC2"),
    ],
)
def test_pictures_of_ros_come_back_as_they_were(
    dtype: str, shape: tuple[int, ...], stated: str | None, encoding: str
) -> None:
    """Whatever the length of the texts before the pixels, which are aligned."""
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    name = pixel_formats.of(shape, array.dtype, stated)
    assert ros_image.encoding_of(shape, array.dtype, name) == encoding
    for frame_id in ("", "a", "ab", "abc", "camera"):
        found = ros_image.decode(ros_image.encode(array, encoding, 1_700_000_000_123_456_789, frame_id))
        assert np.array_equal(found.array, array)
        assert found.array.dtype == array.dtype
        assert (found.time_ns, found.frame_id, found.pixel_format) == (1_700_000_000_123_456_789, frame_id, name)
    with pytest.raises(ValueError, match="sensor_msgs/msg/Image"):
        ros_image.decode(b"\0\1\0\0" + bytes(10))
