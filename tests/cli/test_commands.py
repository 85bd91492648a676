# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them, in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tensorpool.cli.main import COMMANDS
from tensorpool.wire.control import FrameDescriptor
from tests.support.processes import ROOT, Process

DESCRIPTOR = FrameDescriptor(stream_id=10_000, epoch=7, seq=5, trace_id=3).encode().hex()


def tensorpool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    with Process("-m", "tensorpool", *arguments) as process:
        return process.finish(stdin=stdin)


def test_help_lists_every_command_and_each_has_help() -> None:
    """`--help` works for the whole and for each command."""
    code, output = tensorpool("--help")
    assert code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", output, re.MULTILINE), output
        code, text = tensorpool(name, "--help")
        assert code == 0
        assert text.startswith(f"Usage: tensorpool {name}")


def test_a_wrong_command_line_is_exit_code_2() -> None:
    """Misspelt commands and options are refused with usage, not with a traceback."""
    for arguments in (["dem"], ["demo", "--rat", "5"], ["demo", "--shape", "1,x"], ["demo", "--rate", "0"]):
        code, output = tensorpool(*arguments)
        assert code == 2, arguments
        assert "Traceback" not in output


def test_demo_accounts_for_every_frame_and_leaves_nothing_behind() -> None:
    """The demo ends by itself with exit code 0, its summary adds up, and /dev/shm is as it was."""
    before = set(Path("/dev/shm").iterdir())
    code, output = tensorpool("demo", "--seconds", "1", "--rate", "100", "--shape", "240,320")
    assert code == 0, output
    published = int(re.search(r"published (\d+) frames", output)[1])  # type: ignore[index]
    tallies = re.findall(r"(\w+) reader: received (\d+), drops_gap (\d+), drops_late (\d+), wrong 0", output)
    assert [name for name, *_ in tallies] == ["fast", "slow"]
    for _, *counts in tallies:
        assert sum(map(int, counts)) == published
    slow = tallies[1]
    assert int(slow[3]) > 0, "the slow reader is too slow for the ring"
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "tensorpool-demo" in path.name}


def test_decode_prints_json_and_names_the_fault() -> None:
    """Arguments and standard input are decoded to one line of JSON each; malformed input is exit code 1."""
    code, output = tensorpool("decode", DESCRIPTOR)
    assert code == 0
    assert json.loads(output) == {
        "message": "FrameDescriptor",
        "stream_id": 10_000,
        "epoch": 7,
        "seq": 5,
        "timestamp_ns": None,
        "meta_version": None,
        "trace_id": 3,
    }
    spaced = ":".join(re.findall("..", DESCRIPTOR))
    code, output = tensorpool("decode", stdin=f"{spaced}\n\nnot hex\n{DESCRIPTOR[:-2]}\n{DESCRIPTOR}\n")
    assert code == 1
    assert output.count('"FrameDescriptor"') == 2
    assert "not hexadecimal: not hex" in output
    assert re.search(r"error: FrameDescriptor.*\(at byte \d+\)", output), output


def test_the_readme_shows_what_python_prints() -> None:
    """The example of the README gives the result that stands below it."""
    readme = (ROOT / "README.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        *code, shown = block.strip().splitlines()
        scope: dict[str, object] = {}
        head, _, expression = "\n".join(code).rpartition("\n\n")
        exec(head, scope)
        assert repr(eval(expression, scope)) == shown.removeprefix("# ")


@pytest.mark.parametrize("target", ["demo", "test", "setup", "bench", "test-native"])
def test_the_makefile_has_the_targets_that_the_readme_and_ci_use(target: str) -> None:
    """`make TARGET` exists."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
