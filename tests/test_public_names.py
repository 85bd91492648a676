# SPDX-License-Identifier: Apache-2.0
"""What `import tensorpool` gives, and what it costs."""

from __future__ import annotations

import pytest

import tensorpool
from tests.support.processes import run_script


def test_every_public_name_is_there_and_nothing_else() -> None:
    """`__all__` can be imported in full; a name that does not exist is an AttributeError."""
    for name in tensorpool.__all__:
        assert getattr(tensorpool, name).__name__ == name
    assert set(dir(tensorpool)) == set(tensorpool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tensorpool.nothing  # noqa: B018


def test_importing_tensorpool_loads_nothing_heavy() -> None:
    """The package and the command line's help come without numpy, Aeron or the native core."""
    heavy = ("numpy", "tensorpool._core", "tensorpool.wire", "structlog")
    script = f"import sys, tensorpool, tensorpool.cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert run_script(script) == (0, "[]\n")
