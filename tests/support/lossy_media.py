# SPDX-License-Identifier: Apache-2.0
"""A media driver that loses datagrams: Aeron's own loss interceptor, whose rate can be changed while it runs.

    python -m tests.support.lossy_media AERON_DIR [NAME=VALUE ...]       lines on its input:  loss 0.01

The interceptor is part of the C media driver. Two variables of the environment choose it and set its first rate;
its function of configuration, which the shared object exports, tells it later ones.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Final

from tensorpool import aeron
from tensorpool.aeron import library
from tensorpool.aeron.media_driver import parse_setting
from tensorpool.cli.signals import StopSignals

DATA, NAK, STATUS, SETUP = (1 << kind for kind in (1, 2, 3, 5))  # Aeron's frame types
MASK: Final = DATA | NAK | STATUS | SETUP
SEED: Final = 20_261_116
INTERCEPTORS: Final = "AERON_UDP_CHANNEL_INCOMING_INTERCEPTORS"  # the variable that chooses them


class LossParameters(ctypes.Structure):
    """`aeron_udp_channel_interceptor_loss_params_t`."""

    _fields_ = (("rate", ctypes.c_double), ("mask", ctypes.c_ulong), ("seed", ctypes.c_ulonglong))


def set_loss(rate: float) -> None:
    """From now on so many of the arriving datagrams are lost; the next channel reads the variable first."""
    arguments = f"rate={rate}|recv-msg-mask={MASK:x}|seed={SEED}"
    os.environ["AERON_UDP_CHANNEL_TRANSPORT_BINDINGS_LOSS_ARGS"] = arguments
    driver = ctypes.CDLL(str(library.library_paths()[-1]))  # the one that is loaded already
    driver.aeron_udp_channel_interceptor_loss_configure(ctypes.byref(LossParameters(rate, MASK, SEED)))


def _obey() -> None:
    for line in sys.stdin:
        _, rate = line.split()
        set_loss(float(rate))
        print(f"loses {float(rate)}", flush=True)


def main() -> None:
    directory, *settings = sys.argv[1:]
    stop = StopSignals()
    os.environ[INTERCEPTORS] = "loss"
    set_loss(0.0)
    with aeron.MediaDriver(directory, **dict(parse_setting(text) for text in settings)) as driver:
        print(f"media driver at {driver.aeron_dir}", flush=True)
        threading.Thread(target=_obey, daemon=True).start()
        while not stop.wait(60):
            pass


if __name__ == "__main__":
    main()
