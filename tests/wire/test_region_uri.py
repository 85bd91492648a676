# SPDX-License-Identifier: Apache-2.0
"""Region URIs: the grammar of Wire §15.22, both ways."""

from __future__ import annotations

import pytest

from tensorpool.errors import RegionRejected
from tensorpool.wire.region_uri import RegionUri

PATHS = [
    "/",
    "/dev/shm/x",
    "/dev/shm/tensorpool-ann/default/10000/7/header.ring",
    "/a=b",
    "/%7C",
    "/a&b",
    "/!~\\",
]


@pytest.mark.spec("WIRE-15.22-02", "WIRE-15.22-06")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("suffix", "require_hugepages"),
    [("", False), ("|require_hugepages=false", False), ("|require_hugepages=true", True)],
)
def test_the_grammar_is_read_and_written(path: str, suffix: str, require_hugepages: bool) -> None:
    """A path and perhaps require_hugepages, which is false by default and then not written."""
    uri = RegionUri.parse(f"shm:file?path={path}{suffix}")
    assert uri == RegionUri(path, require_hugepages)
    assert str(uri) == f"shm:file?path={path}" + ("|require_hugepages=true" if require_hugepages else "")
    assert RegionUri.parse(str(uri)) == uri


@pytest.mark.parametrize(
    ("text", "check"),
    [
        pytest.param(text, check, marks=claim, id=text)
        for claim, check, texts in [
            (
                pytest.mark.spec("WIRE-15.22-01"),
                "scheme",
                ["", "shm:", "shm:file", "shm:posix?path=/x", "shm:anon?path=/x", "file:///x", "/x"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-01"),
                "scheme",
                ["SHM:file?path=/x", "shm:FILE?path=/x", " shm:file?path=/x", "shm:file:path=/x"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-02"),
                "path",
                [
                    "shm:file?",
                    "shm:file?require_hugepages=true|path=/x",
                    "shm:file?PATH=/x",
                    "shm:file?|path=/x",
                ],
            ),
            (
                pytest.mark.spec("WIRE-15.22-02"),
                "parameter",
                ["shm:file?path=/x|", "shm:file?path=/x||require_hugepages=true"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-02"),
                "parameter",
                ["shm:file?path=/x|require_hugepages=true|", "shm:file?path=/x|path=/x"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-02"),
                "parameter",
                ["shm:file?path=/x|require_hugepages=true|require_hugepages=true"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-03"),
                "separator",
                ["shm:file?path=/x&require_hugepages=true", "shm:file?path=/x&require_hugepages=false"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-04"),
                "path",
                ["shm:file?path=", "shm:file?path", "shm:file?path=|require_hugepages=true"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-05"),
                "path",
                ["shm:file?path=/a b", "shm:file?path=/a?b", "shm:file?path=/é", "shm:file?path=/a\x80"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-05"),
                "path",
                ["shm:file?path=/a\n", "shm:file?path=/a\0", "shm:file?path=/\x7f", "shm:file?path=/\udc80"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-02"),
                "path",
                ["shm:file?path=x", "shm:file?path=./x", "shm:file?path=C:\\x"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-07"),
                "require_hugepages",
                [f"shm:file?path=/x|require_hugepages{v}" for v in ("=1", "=yes", "=True", "=", "")],
            ),
            (
                pytest.mark.spec("WIRE-15.22-08"),
                "parameter",
                ["shm:file?path=/x|foo=bar", "shm:file?path=/x|REQUIRE_HUGEPAGES=true"],
            ),
            (
                pytest.mark.spec("WIRE-15.22-08"),
                "parameter",
                [
                    "shm:file?path=/x|require_hugepages=true|foo=bar",
                    "shm:file?path=/x| require_hugepages=true",
                ],
            ),
        ]
        for text in texts
    ],
)
def test_everything_else_is_rejected_with_the_check_that_failed(text: str, check: str) -> None:
    """The rejection carries the URI as it came and names the rule that it breaks."""
    with pytest.raises(RegionRejected) as caught:
        RegionUri.parse(text)
    assert (caught.value.uri, caught.value.check) == (text, check)


@pytest.mark.parametrize("path", ["", "x", "/a b", "/a|b", "/a?b", "/é", "/a\n", "/x&require_hugepages=true"])
def test_a_path_that_cannot_be_written_is_rejected_when_the_uri_is_made(path: str) -> None:
    """A region in such a directory could never be announced."""
    with pytest.raises(RegionRejected) as caught:
        RegionUri(path)
    assert caught.value.check in ("path", "separator")
