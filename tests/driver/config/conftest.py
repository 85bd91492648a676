# SPDX-License-Identifier: Apache-2.0
"""Every key of the driver's configuration, and configurations with one key changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensorpool.driver.config import DriverConfig
from tensorpool.errors import ConfigError

IPC = "aeron:ipc?term-length=4m"

# Two profiles, `a` first, and a stream that says no more than it must.
BASE = """
[profiles.a]
payload_pools = [{ pool_id = 1, stride_bytes = 65536 }]
[profiles.b]
payload_pools = [{ pool_id = 1, stride_bytes = 64 }]
[streams.s]
stream_id = 10000
"""


class Key(NamedTuple):
    """A key, its default with BASE, and three values: in the file as TOML, as a variable's text, as a flag.

    `seen` is what the first two are worth where that is not their text.
    """

    key: str
    variable: str | None
    default: object
    file: str
    text: str = ""
    flag: object = None
    seen: tuple[object, object] | None = None


def number(key: str, variable: str, default: int) -> Key:
    return Key(key, variable, default, "7001", "7002", 7003, (7001, 7002))


def ids(key: str, variable: str) -> Key:
    return Key(key, variable, "", "[7001, 7009]", "7011-7019", "7021-7029", ("7001-7009", "7011-7019"))


def load(
    text: str = BASE, environ: Mapping[str, str] | None = None, /, *, folder: Path, **overrides: Any
) -> DriverConfig:
    path = folder / "driver.toml"
    path.write_text(text)
    return DriverConfig.load(path, environ or {}, overrides)


def refused(key: str, value: object, folder: Path, /, **overrides: Any) -> ConfigError:
    """The error for one key of BASE with a value that it may not have."""
    with pytest.raises(ConfigError) as caught:
        load(folder=folder, **{key: value}, **overrides)
    return caught.value
