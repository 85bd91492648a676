# SPDX-License-Identifier: Apache-2.0
"""The phases of an attachment as a table: walked through the machine, and compared with the page that draws it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tensorpool.client.attachment_phases import TRANSITIONS, Event, Phase
from tensorpool.client.leaseless_attachment import LEASELESS_TRANSITIONS
from tensorpool.wire.driver import ResponseCode, ShmDetachResponse
from tests.client.attachment.conftest import T0, Bench
from tests.client.conftest import refused

PAGE = Path(__file__).parents[2] / "docs/protocol/sequences.md"


def bench_in(phase: Phase, *, has_request: bool = False) -> Bench:
    """An attachment that is in a phase; `has_request`: the driver has not answered its request."""
    bench, other = Bench(), Bench()
    attachment = bench.attachment
    if phase in (Phase.ATTACHED, Phase.DETACHING):
        bench.attach()
    elif phase in (Phase.ATTACHING, Phase.ABANDONED, Phase.BACKOFF) or has_request:
        bench.start()
    if phase in (Phase.ABANDONED, Phase.DETACHING, Phase.CLOSED):
        attachment.detach(T0)
    if phase is Phase.UNATTACHED and has_request:
        attachment.on_connection_lost("")
    if phase is Phase.BACKOFF:
        act(bench, Event.REFUSAL)
        if has_request:
            other.start()
            attachment.resume(other.attachment)
    assert attachment.phase is phase
    return bench


def act(bench: Bench, event: Event) -> None:
    """Let it happen."""
    attachment = bench.attachment
    match event:
        case Event.START:
            attachment.start(T0)
        case Event.GRANT if bench.request is not None:
            bench.answer()
        case Event.REFUSAL if bench.request is not None:
            attachment.on_attach_response(refused(bench.request.correlation_id), T0, T0)
        case Event.LOSS:
            attachment.on_mapping_failed(T0)
        case Event.DETACH | Event.ABANDON:
            attachment.detach(T0)
        case Event.RELEASE:
            correlation_id = attachment._correlation_id
            attachment.on_detach_response(ShmDetachResponse(correlation_id=correlation_id, code=ResponseCode.OK))
        case Event.SHUTDOWN:
            attachment.on_driver_shutdown("", T0)
        case Event.DISCONNECTION:
            attachment.on_connection_lost("")


@pytest.mark.spec("DRV-4.12-01", "DRV-4.12-02", "DRV-4.12-03")
@pytest.mark.parametrize("row", list(TRANSITIONS), ids=lambda row: f"{row[0].name} {row[1].name}")
def test_an_attachment_follows_every_row(row: tuple[Phase, Event]) -> None:
    """The event leads from the phase to where the table says."""
    bench = bench_in(row[0], has_request=row[1] is Event.ABANDON)
    act(bench, row[1])
    assert bench.attachment.phase is TRANSITIONS[row]


def test_an_event_without_a_row_changes_nothing() -> None:
    """In every phase; whether closing it is DETACH or ABANDON depends on the request."""
    closing = {Event.DETACH, Event.ABANDON}
    for phase in Phase:
        for event in Event:
            rows = {(phase, each) for each in (closing if event in closing else {event})}
            if not rows & TRANSITIONS.keys():
                bench = bench_in(phase)
                act(bench, event)
                assert bench.attachment.phase is phase, event


@pytest.mark.parametrize("table", [TRANSITIONS, LEASELESS_TRANSITIONS], ids=["leased", "leaseless"])
def test_every_phase_can_be_reached_and_closed(table: Mapping[tuple[Phase, Event], Phase]) -> None:
    """From UNATTACHED, by rows of the table; CLOSED is for good."""

    def reached_from(start: Phase) -> set[Phase]:
        seen = {start}
        while more := {after for (before, _), after in table.items() if before in seen} - seen:
            seen |= more
        return seen

    named = {before for before, _ in table} | set(table.values())
    assert reached_from(Phase.UNATTACHED) == named
    assert all(Phase.CLOSED in reached_from(phase) for phase in named)
    assert not any(before is Phase.CLOSED for before, _ in table)


def test_the_protocol_page_draws_the_table() -> None:
    """Every row, and no other."""
    section = PAGE.read_text().partition("### The attachment of a client\n")[2].partition("\n### ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    drawn = {(state, event, following) for state, event, _, following in cells[2:]}
    assert drawn == {(phase.name, event.value, after.name) for (phase, event), after in TRANSITIONS.items()}
