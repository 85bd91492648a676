# SPDX-License-Identifier: Apache-2.0
"""Region URIs: where a shared-memory region lies, as text.

    shm:file?path=/dev/shm/tensorpool-ann/default/10000/7/header.ring
    shm:file?path=/dev/hugepages/1.pool|require_hugepages=true

Reads and writes exactly the grammar of Wire §15.22, case-sensitively and without percent-decoding, and
refuses everything else (decision D4). Never touches the file system: whether the path may be opened is for
`shm` to judge.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from tensorpool.errors import RegionRejected

_PREFIX: Final = "shm:file?"
_PATH: Final = re.compile(r"/[!-~]*")


class RegionUri(msgspec.Struct, frozen=True):
    """A parsed region URI; `str()` gives its canonical text.

    >>> RegionUri.parse("shm:file?path=/dev/shm/x|require_hugepages=true")
    RegionUri(path='/dev/shm/x', require_hugepages=True)

    Both `parse` and the constructor raise RegionRejected, whose `check` is "scheme", "path", "separator",
    "parameter" or "require_hugepages".
    """

    path: str
    require_hugepages: bool = False

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path) or "?" in self.path or "|" in self.path:
            detail = "an absolute path of visible ASCII without '?' and '|' is needed"
            raise RegionRejected(str(self), "path", f"{detail}, not {self.path!r}")
        if "&require_hugepages=" in self.path:
            # The grammar allows '&' in a path, so this would silently be one that demands no huge pages.
            raise RegionRejected(str(self), "separator", "parameters are separated by '|', not by '&'")

    def __str__(self) -> str:
        suffix = "|require_hugepages=true" if self.require_hugepages else ""
        return f"{_PREFIX}path={self.path}{suffix}"

    @classmethod
    def parse(cls, text: str) -> RegionUri:
        """Read a URI as a peer announced it."""
        if not text.startswith(_PREFIX):
            raise RegionRejected(text, "scheme", "only shm:file is supported")
        first, *others = text.removeprefix(_PREFIX).split("|")
        name, _, path = first.partition("=")
        if name != "path":
            raise RegionRejected(text, "path", f"path comes first and is required, found {name!r}")
        require_hugepages = False
        for position, parameter in enumerate(others):
            name, _, value = parameter.partition("=")
            if name != "require_hugepages" or position > 0:
                accepted = "one require_hugepages may follow the path"
                raise RegionRejected(text, "parameter", f"{accepted}, found {parameter!r}")
            if value not in ("true", "false"):
                raise RegionRejected(text, "require_hugepages", f"true or false is needed, not {value!r}")
            require_hugepages = value == "true"
        try:
            return cls(path, require_hugepages)
        except RegionRejected as rejected:
            raise RegionRejected(text, rejected.check, rejected.detail) from None
