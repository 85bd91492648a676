# SPDX-License-Identifier: Apache-2.0
"""No read that the slot protocol accepts holds a mixture of two frames, and the test that says so can fail.

Real processes: one writes, three read (tests/native/torn_reads.cpp). TENSORPOOL_SEED repeats a run;
benchmarks/torn_reads.py counts ten million reads.
"""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tensorpool import _core
from tests.levels import SEED, SOAK
from tests.native.mutants import MUTANTS, STREAM_ALWAYS, Mutant, is_caught
from tests.native.programs import Edit, build, headers, run

SECONDS = 5 * SOAK
KINDS = sorted({kind for use in _core.copy_kinds() for kind in _core.copy_candidates(use)})  # of this processor
FEW = ("no-header-recheck", "commit-before-payload", "relaxed-commit")  # one of each kind


@pytest.mark.spec("WIRE-15.13-02", "WIRE-8.3-04", "WIRE-8.3-06", "WIRE-8.3-15", "WIRE-8.3-17")  # whole frames only
@pytest.mark.spec("WIRE-8.3-09", "WIRE-15.3-02")  # what changed during the read is dropped, once, as late
@pytest.mark.timeout(7 * SECONDS + 360)
@pytest.mark.parametrize(
    "edits", [pytest.param((), id="as-built"), pytest.param((STREAM_ALWAYS,), id="streaming-stores-only")]
)
def test_no_torn_read_is_accepted_while_every_slot_is_overwritten(edits: tuple[Edit, ...]) -> None:
    """Frames of 64 B to 4 MiB are whole when accepted; what changes during the read is dropped as late."""
    program = build("torn_reads", edits)
    for seconds in (SECONDS, 6 * SECONDS):  # longer, where a busy neighbour left the readers too little
        result = run(program, "--seconds", str(seconds), "--seed", str(SEED), timeout=seconds + 120)
        report = result.report
        print(report)
        assert report["torn_header"] == report["torn_payload"] == 0, report
        assert report["unexplained"] == report["crashed"] == 0, report
        assert set(report["drops"]) <= {"NOT_COMMITTED", "OVERWRITTEN", "STALE"}, report
        assert report["adds_up"], report
        assert report["attempts"] == report["accepted"] + report["raced"] + sum(report["drops"].values()), report
        assert result.code == 0, report
        if was_tried(report):
            break
    assert was_tried(report), report
    assert not edits or report["streamed"] > 0, report


def was_tried(report: dict[str, Any]) -> bool:
    """Whether every size was delivered, and frames did change under the readers' hands."""
    by_size = all(report["accepted_by_size"].values()) and all(report["raced_by_size"].values())
    return by_size and report["raced_header"] > 0 and report["mixed_discarded"] > 100


@pytest.mark.spec("WIRE-15.13-02", "WIRE-8.3-06")
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_copy_makes_a_read_torn(kind: str) -> None:
    """Whichever instructions the calibration or TENSORPOOL_COPY choose, accepted frames are whole."""
    edits = (STREAM_ALWAYS,) if kind.startswith("stream-") else ()
    seconds = SECONDS / 4
    limits = ("--seconds", str(seconds), "--seed", str(SEED), "--copy", kind)
    result = run(build("torn_reads", edits), *limits, timeout=seconds + 120)
    report = result.report
    assert report["torn_header"] == report["torn_payload"] == report["unexplained"] == report["crashed"] == 0, report
    assert result.code == 0, report
    assert report["adds_up"], report
    assert report["mixed_discarded"] > 0, report  # frames did change under the readers' hands


@pytest.mark.spec("WIRE-8.3-03", "WIRE-8.3-07", "WIRE-15.3-03")
def test_no_reordering_that_a_weaker_machine_may_do_makes_a_read_torn() -> None:
    """Acquire, release and fences stand where they must: nothing that they permit is accepted and torn."""
    result = run(build("litmus"))
    assert result.report["torn_outcomes"] == 0, result.report
    assert result.report["programs"] >= 8
    assert result.code == 0


def mutants() -> list[ParameterSet]:
    """`make test` builds a few of them, `make soak` all."""
    return [
        pytest.param(mutant, id=mutant.name, marks=() if mutant.name in FEW else pytest.mark.soak) for mutant in MUTANTS
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mutant", mutants())
def test_a_known_mistake_is_caught(mutant: Mutant) -> None:
    """The same programs, built with one mistake in the headers, find it within seconds."""
    result = mutant.attack(seconds=15)
    assert is_caught(result), f"{mutant.mistake}: {result.report}"


def test_an_edit_that_does_not_apply_is_an_error() -> None:
    """A mutant whose text is gone from the headers cannot pass for one that was caught."""
    with pytest.raises(LookupError, match="0 times"):
        headers((Edit("ring.hpp", "no such text", ""),))
    with pytest.raises(LookupError, match="not once"):
        headers((Edit("ring.hpp", "const", ""),))
