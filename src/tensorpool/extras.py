# SPDX-License-Identifier: Apache-2.0
"""Asks for the packages of an extra before a part of tensorpool imports them."""

from __future__ import annotations

from importlib.util import find_spec

from tensorpool.errors import MissingExtra


def require(part: str, extra: str, *packages: str) -> None:
    """Raises MissingExtra unless all of `packages` are installed; imports none of them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(part, extra, *missing)
