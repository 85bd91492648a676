# SPDX-License-Identifier: Apache-2.0
"""Packages and programs that only some parts need: looked for before they are used, with what to install.

Nothing here imports anything heavy.
"""

from __future__ import annotations

import importlib
import shutil
from importlib.util import find_spec
from types import ModuleType

from tensorpool.errors import MissingExtra, TensorPoolError


def require(part: str, extra: str, *packages: str) -> None:
    """Raises MissingExtra unless all of `packages` are installed; imports none of them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(part, extra, *missing)


def library(module: str, part: str, extra: str) -> ModuleType:
    """Import a library of an extra. Raises MissingExtra."""
    require(part, extra, module.partition(".")[0])
    return importlib.import_module(module)


def program(name: str, part: str, package: str) -> str:
    """The path of a program. Raises TensorPoolError with the Debian package that has it."""
    path = shutil.which(name)
    if path is None:
        raise TensorPoolError(f"{part} needs the program {name}: install {package} (Debian: apt-get install {package})")
    return path
