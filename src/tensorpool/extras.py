# SPDX-License-Identifier: Apache-2.0
"""Libraries and programs that only some parts need: imported or started at first use, with what to install if missing.

Nothing here imports anything heavy.
"""

from __future__ import annotations

import importlib
import shutil
from types import ModuleType

from tensorpool.errors import TensorPoolError


class NotInstalled(TensorPoolError):
    """A library or a program that this machine lacks; the text says how to install it."""


def library(module: str, purpose: str, extra: str) -> ModuleType:
    """Import a library of an extra. Raises NotInstalled where it, and not something that it imports, is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != missing:
            raise
        raise NotInstalled(f"{purpose} needs {missing}: pip install 'aeron-tensorpool[{extra}]'") from None


def program(name: str, purpose: str, package: str) -> str:
    """The path of a program. Raises NotInstalled."""
    path = shutil.which(name)
    if path is None:
        raise NotInstalled(f"{purpose} needs the program {name}: install {package} (Debian: apt-get install {package})")
    return path
