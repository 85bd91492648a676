# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md: every key of every configuration file, as its struct declares it.

    python -m tests.settings_reference

`test_settings.py` fails when the page is out of date or a key has no meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from tensorpool.bridge.config import BridgeConfig
from tensorpool.control.config import ControlConfig
from tensorpool.discovery.config import RegistryConfig
from tensorpool.driver.config import DriverConfig
from tensorpool.settings import Configuration, Key, describe
from tensorpool.settings.schema import Field, Shape, fields
from tensorpool.supervisor.config import SupervisorConfig

PAGE: Final = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD: Final = """\
# Configuration

Every key of every configuration file. Generated from the code by `make configuration`; a test fails when this page is
out of date.

A process reads one TOML file (`--config`). Environment variables override the file, flags (`--set key=value`) override
both. The variable of a key is its name in upper case, with `_` for every character that is neither letter nor digit:
`driver.control_stream_id` is `DRIVER_CONTROL_STREAM_ID`. In a variable integers are decimal, booleans `true` or
`false`, and entries of an array are separated by commas. A key in an array of tables (`[]`) has no variable; a key of a
named table (`<name>`) has one if the file has that table. An unknown key and a value that is not accepted are refused.

A default in *italics* is derived from other keys when the key is left out.
"""

CONFIGURATIONS: Final[dict[str, type[Configuration]]] = {
    "the driver": DriverConfig,
    "a registry": RegistryConfig,
    "the supervisor": SupervisorConfig,
    "a bridge": BridgeConfig,
}
SHARED: Final = frozenset({ControlConfig})


def page() -> str:
    """The text of the page: the tables of each configuration, those that several share once."""
    parts = [HEAD]
    seen: set[type[msgspec.Struct]] = set()
    for owner, configuration in CONFIGURATIONS.items():
        for name, field in fields(configuration).items():
            if field.struct not in seen:
                seen.add(field.struct)
                whose = "every service" if field.struct in SHARED else owner
                parts.append(_section(name, field, whose))
    return "\n".join(parts)


def keys() -> list[Key]:
    """Every key of every configuration."""
    return [key for configuration in CONFIGURATIONS.values() for key in describe(configuration)]


def _section(name: str, field: Field, owner: str) -> str:
    table, prefix = {
        Shape.SECTION: (f"[{name}]", name),
        Shape.NAMED: (f"[{name}.<name>]", f"{name}.<name>"),
        Shape.ARRAY: (f"[[{name}]]", f"{name}[]"),
    }[field.shape]
    head = [f"## `{table}` of {owner}", "", "| key | accepts | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *(_row(key) for key in describe(field.struct, prefix)), ""])


def _row(key: Key) -> str:
    default = "required" if key.default is None else f"*{key.default}*" if key.is_derived else f"`{key.default}`"
    return "| " + " | ".join(_escaped(text) for text in (f"`{key.key}`", key.accepted, default, key.meaning)) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
