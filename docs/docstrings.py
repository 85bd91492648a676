# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe: examples of docstrings (`>>> …`) become blocks of code, without the marks for doctest."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?!>>>)\S.*|\n\1>>> .*)*", re.MULTILINE)
_FLAG = re.compile(r" *# doctest: \+\w+")


class Examples(griffe.Extension):
    """Fences each example, with the output that follows it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    return f"{example[1]}```pycon\n{_FLAG.sub('', example[0])}\n{example[1]}```"
