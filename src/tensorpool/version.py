# SPDX-License-Identifier: Apache-2.0
"""The version of the installed package, as its metadata has it. docs/stability.md says what a version promises."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from tensorpool.errors import DISTRIBUTION

__version__: Final = version(DISTRIBUTION)
