# SPDX-License-Identifier: Apache-2.0
"""A media driver as Aeron's own program runs it: its C functions, its defaults, its transport, and none of our code.

    python -m tests.support.stock_media DIRECTORY LIBRARY…

Prints `stock` when it serves, if the UDP transport is Aeron's default one; ends with its standard input.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from tests.support.processes import Process


def stock_media_driver(directory: str) -> Process:
    """In a process of its own, when it is there."""
    from tensorpool.aeron.library import library_paths

    process = Process("-m", "tests.support.stock_media", directory, *map(str, library_paths()))
    try:
        assert process.read_line() == "stock"
    except BaseException:
        process.reap()
        raise
    return process


def serve(directory: str, libraries: list[ctypes.CDLL]) -> None:
    pointer = ctypes.c_void_p
    context, driver = pointer(), pointer()
    assert _find(libraries, "aeron_driver_context_init")(ctypes.byref(context)) == 0
    assert _find(libraries, "aeron_driver_context_set_dir")(context, directory.encode()) == 0
    assert _find(libraries, "aeron_driver_init")(ctypes.byref(driver), context) == 0
    assert _find(libraries, "aeron_driver_start")(driver, False) == 0
    current = _find(libraries, "aeron_driver_context_get_udp_channel_transport_bindings")
    current.restype = pointer
    default = ctypes.cast(_find(libraries, "aeron_udp_channel_transport_bindings_default"), pointer).value
    is_stock = current(context) == default and "tensorpool._core" not in sys.modules
    print("stock" if is_stock else "not Aeron's own transport", flush=True)
    sys.stdin.read()
    _find(libraries, "aeron_driver_close")(driver)
    _find(libraries, "aeron_driver_context_close")(context)


def _find(libraries: list[ctypes.CDLL], name: str) -> Any:
    """A symbol of Aeron's; its address is also that of a variable."""
    return next(getattr(library, name) for library in libraries if hasattr(library, name))


if __name__ == "__main__":
    serve(sys.argv[1], [ctypes.CDLL(path) for path in sys.argv[2:]])
