# SPDX-License-Identifier: Apache-2.0
"""The commands as a user types them, in processes of their own."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from tensorpool.cli.main import COMMANDS, group
from tensorpool.wire.control import FrameDescriptor
from tests.support.processes import ROOT, Process

DESCRIPTOR = FrameDescriptor(stream_id=10_000, epoch=7, seq=5, trace_id=3).encode().hex()


def tensorpool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    with Process("-m", "tensorpool", *arguments) as process:
        return process.finish(stdin=stdin)


def help_of(*arguments: str) -> tuple[int, str]:
    """In this process: a dozen interpreters would take a dozen seconds."""
    result = CliRunner().invoke(group, [*arguments, "--help"], prog_name="tensorpool")
    return result.exit_code, result.output


def test_help_lists_every_command_and_each_has_help() -> None:
    """`--help` works for the whole and for each command."""
    code, output = tensorpool("--help")
    assert code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", output, re.MULTILINE), output
        code, text = help_of(name)
        assert code == 0
        assert text.startswith(f"Usage: tensorpool {name}")


def test_a_wrong_command_line_is_exit_code_2() -> None:
    """Misspelt commands and options are refused with usage, not with a traceback."""
    code, output = tensorpool("dem")
    assert code == 2
    assert "No such command 'dem'" in output
    for arguments in (["demo", "--rat", "5"], ["demo", "--shape", "1xx"], ["demo", "--rate", "0"]):
        result = CliRunner().invoke(group, arguments)
        assert result.exit_code == 2, arguments
        assert "Usage:" in result.output


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


@pytest.mark.parametrize("target", ["demo", "test", "setup", "bench", "test-native"])
def test_the_makefile_has_the_targets_that_the_readme_and_ci_use(target: str) -> None:
    """`make TARGET` exists."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
