# SPDX-License-Identifier: Apache-2.0
"""Cameras, files and programs as sources of frames, and `Ingest`, which publishes them on a stream."""

from typing import TYPE_CHECKING

from tensorpool import lazy

if TYPE_CHECKING:
    from tensorpool.sources.ffmpeg import FfmpegSource
    from tensorpool.sources.gstreamer import GStreamerSource
    from tensorpool.sources.images import ImageSource
    from tensorpool.sources.ingest import Ingest
    from tensorpool.sources.mcap import McapSource
    from tensorpool.sources.npy import NpySource
    from tensorpool.sources.opencv import OpenCvSource
    from tensorpool.sources.protocol import Source, SourceFailed, SourceFrame

__all__ = [
    "FfmpegSource",
    "GStreamerSource",
    "ImageSource",
    "Ingest",
    "McapSource",
    "NpySource",
    "OpenCvSource",
    "Source",
    "SourceFailed",
    "SourceFrame",
]

_HOMES = dict.fromkeys(("Source", "SourceFailed", "SourceFrame"), "tensorpool.sources.protocol") | {
    "FfmpegSource": "tensorpool.sources.ffmpeg",
    "GStreamerSource": "tensorpool.sources.gstreamer",
    "ImageSource": "tensorpool.sources.images",
    "Ingest": "tensorpool.sources.ingest",
    "McapSource": "tensorpool.sources.mcap",
    "NpySource": "tensorpool.sources.npy",
    "OpenCvSource": "tensorpool.sources.opencv",
}

if not TYPE_CHECKING:
    __getattr__ = lazy.exports(__name__, _HOMES)
