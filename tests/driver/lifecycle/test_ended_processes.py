# SPDX-License-Identifier: Apache-2.0
"""Which process holds a lease, as declared; and the end of the lease of a process that has ended."""

from __future__ import annotations

from tensorpool.driver.clients import Owner
from tensorpool.driver.leases import Lease
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire.driver import Role
from tests.driver.conftest import FRONT, REAR, attach, created, detach
from tests.driver.lifecycle.conftest import message_of, outline, with_producer

PROCESS = ProcessIdentity(pid=8812, start_ticks=5, pid_namespace=1, time_namespace=2, boot_id="boot")
OTHER = ProcessIdentity(pid=9, start_ticks=5, pid_namespace=1, time_namespace=2, boot_id="boot")


SESSION = 77  # in which client 7 asks


def declare(lifecycle: Lifecycle, process: ProcessIdentity = PROCESS, session_id: int = SESSION) -> bool:
    owner = Owner(process=process, description=ProcessDescription(user="lab", command="python acquire.py"))
    return lifecycle.on_identify(session_id, owner)


def producing() -> Lifecycle:
    """Client 7 holds lease 500, and has not declared itself."""
    lifecycle = with_producer()
    lifecycle.clients.on_request(7, SESSION)
    return lifecycle


def held(lifecycle: Lifecycle) -> Lease:
    lease = lifecycle.leases.get(500)
    assert lease is not None
    return lease


def test_the_lease_of_an_ended_process_ends_and_the_next_producer_follows() -> None:
    """Revoked with the reason, a new epoch without a producer, then the one of the new producer."""
    lifecycle = producing()
    assert declare(lifecycle)
    lease = lifecycle.producer_to_look_for(FRONT)
    assert lease is held(lifecycle)
    effects = lifecycle.on_process_ended(lease, 3)
    assert outline(effects) == ["revoked 500 REVOKED", f"create {FRONT}"]
    assert message_of(effects[0]).error_message == "its process 8812 has ended"
    assert lifecycle.on_attach(attach(8, role=Role.PRODUCER), 3) == []
    assert outline(created(lifecycle, FRONT, 3)) == [f"announce {FRONT}", f"create {FRONT} for a producer"]
    assert outline(created(lifecycle, FRONT, 4, reserved=True)) == ["attach OK", f"announce {FRONT}"]
    assert lifecycle.counts["leases_of_ended_processes"] == 1


def test_without_a_declaration_no_process_is_looked_for() -> None:
    """As of other implementations; nor on a stream without a producer, or on one that does not exist."""
    lifecycle = with_producer()
    assert [lifecycle.producer_to_look_for(stream_id) for stream_id in (FRONT, REAR, 1)] == [None, None, None]
    assert lifecycle.on_process_ended(held(lifecycle), 3) == []
    assert held(lifecycle)


def test_a_declaration_of_another_session_is_not_the_leases() -> None:
    """The lease has no process."""
    lifecycle = producing()
    assert declare(lifecycle, session_id=SESSION + 1)
    assert held(lifecycle).process is None


def test_a_declaration_counts_before_and_after_the_request() -> None:
    """Both come in logs of their own: either may be read first."""
    lifecycle = producing()
    assert declare(lifecycle)
    assert held(lifecycle).process == PROCESS
    lifecycle.clients.on_request(8, SESSION)
    lifecycle.on_attach(attach(8), 3)
    later = lifecycle.leases.of_client(8)
    assert later is not None
    assert later.process == PROCESS


def test_the_first_declaration_counts() -> None:
    """The same again changes nothing; another one is ignored, and counted."""
    lifecycle = producing()
    assert [declare(lifecycle, process) for process in (PROCESS, PROCESS, OTHER)] == [True, True, False]
    assert held(lifecycle).process == PROCESS
    assert lifecycle.counts["identifications_ignored"] == 1


def test_a_process_that_ended_after_its_lease_changes_nothing() -> None:
    """The lease was given back, and the stream has another producer."""
    lifecycle = producing()
    declare(lifecycle)
    lease = held(lifecycle)
    lifecycle.on_detach(detach(500, 7, role=Role.PRODUCER), 1)
    assert lifecycle.on_process_ended(lease, 2) == []
