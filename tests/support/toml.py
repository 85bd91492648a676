# SPDX-License-Identifier: Apache-2.0
"""Configuration files of a test's own: tables as TOML. A key of None is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any]) -> str:
    """A file with these tables and lists of tables; what is nested in them is written inline."""
    lines: list[str] = []
    for name, content in tables.items():
        is_list = isinstance(content, list)
        for table in content if is_list else [content]:
            lines += [f"[[{name}]]" if is_list else f"[{name}]", *_assignments(table)]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_assignments(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value)


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
