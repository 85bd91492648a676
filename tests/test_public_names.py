# SPDX-License-Identifier: Apache-2.0
"""What `import tensorpool` gives, and what it costs."""

from __future__ import annotations

import tomllib

import pytest

import tensorpool
from tests.support.processes import ROOT, Process, run_script


def test_every_public_name_is_there_and_nothing_else() -> None:
    """`__all__` can be imported in full; a name that does not exist is an AttributeError."""
    for name in tensorpool.__all__:
        assert getattr(tensorpool, name).__name__ == name
    assert set(dir(tensorpool)) == set(tensorpool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tensorpool.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_installed_package() -> None:
    """`tensorpool.__version__`, `tensorpool --version` and the project's own file agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tensorpool.__version__ == project["version"]
    with Process("-m", "tensorpool", "--version") as process:
        assert process.finish() == (0, f"{project['version']}\n")


def test_importing_tensorpool_loads_nothing_heavy() -> None:
    """The package and the command line's help come without numpy, Aeron or the native core."""
    heavy = ("numpy", "tensorpool._core", "tensorpool.wire", "tensorpool.torch", "torch", "structlog")
    script = f"import sys, tensorpool, tensorpool.cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert run_script(script) == (0, "[]\n")


def test_services_and_questions_need_no_numpy() -> None:
    """A process that serves memory or only asks what is there starts without arrays; a name loads what it needs."""
    script = """
import sys, tensorpool.client.client, tensorpool.cli.driver, tensorpool.cli.ls, tensorpool.driver, tensorpool.discovery
print("numpy" in sys.modules)
import tensorpool.client, tensorpool.shm
print(tensorpool.client.Consumer.__name__, tensorpool.shm.view_of.__name__, "numpy" in sys.modules)
for package in (tensorpool.client, tensorpool.shm):
    print(all(hasattr(package, name) for name in package.__all__), hasattr(package, "nothing"))
"""
    assert run_script(script) == (0, "False\nConsumer view_of True\nTrue False\nTrue False\n")
