# SPDX-License-Identifier: Apache-2.0
"""Frames as files that other programs read: pictures, video, HDF5, Zarr, MCAP. `ExportJob` runs an export."""

from typing import Final

FORMATS: Final = ("png", "tiff", "npy", "mp4", "zarr", "hdf5", "mcap", "foxglove")
