# SPDX-License-Identifier: Apache-2.0
"""Clients: which process asks, attaches that wait for its declaration, and what the audit log gets to know of it."""

from __future__ import annotations

from typing import Any

from tensorpool.driver.audit import AGAIN_NS, WAIT_NS, Event, Trail, refusal_event
from tensorpool.driver.clients import DECLARATION_NS, MAX_CLIENTS, MAX_WAITING, Clients, Owner
from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire.driver import ResponseCode
from tests.driver.conftest import FRONT, attach


def owner(pid: int = 8812, user: str = "lab", *, is_seen: bool = True) -> Owner:
    process = ProcessIdentity(pid=pid, start_ticks=5, pid_namespace=1, time_namespace=2, boot_id="boot")
    description = ProcessDescription(user=user, host="h", program="acquire.py", command="python acquire.py")
    return Owner(process=process, description=description, is_seen=is_seen)


def test_an_owner_in_words() -> None:
    """As refusals name it; what only the client says is marked."""
    assert str(owner()) == "pid 8812, user lab, python acquire.py"
    assert str(owner(is_seen=False)) == "pid 8812, user lab, python acquire.py, declared"


def test_an_attach_waits_for_the_declaration_of_its_session() -> None:
    """Once, for a moment; with the declaration it goes on."""
    clients = Clients()
    assert clients.defer(attach(1), 77, 0)
    clients.on_request(1, 77)
    assert clients.defer(attach(1), 77, 1), "the same request again"
    assert clients.take_due(DECLARATION_NS - 1) == []
    clients.declare(77, owner())
    assert [request.client_id for request in clients.take_due(2)] == [1]
    assert clients.take_due(2 * DECLARATION_NS) == []
    assert not clients.defer(attach(2), 77, 3), "its session is known"


def test_an_attach_without_a_declaration_goes_on_after_a_moment() -> None:
    """As of another implementation; asking again it does not wait again."""
    clients = Clients()
    assert clients.defer(attach(1), 77, 0)
    clients.on_request(1, 77)
    assert [request.client_id for request in clients.take_due(DECLARATION_NS)] == [1]
    assert not clients.defer(attach(1), 77, DECLARATION_NS)


def test_strangers_take_a_bounded_amount_of_memory() -> None:
    """Client ids and sessions without end; one more than may wait is not kept waiting."""
    clients = Clients()
    for number in range(MAX_CLIENTS + 10):
        clients.on_request(number, number)
        clients.declare(number, owner())
    assert len(clients) == 2 * MAX_CLIENTS
    clients = Clients()
    assert [clients.defer(attach(number), 77, 0) for number in range(1, MAX_WAITING + 2)][-2:] == [True, False]


def trail(clients: Clients, names: dict[int, str] | None = None) -> Trail:
    known = {FRONT: "front"} if names is None else names
    return Trail(clients, lambda stream_id: known.get(stream_id, ""))


def taken(trail: Trail, now_ns: int) -> list[tuple[str, dict[str, Any]]]:
    return list(trail.take(now_ns))


def test_a_line_waits_for_its_client_and_keeps_its_place() -> None:
    """The second event knows its client and comes second all the same."""
    clients = Clients()
    lines = trail(clients)
    clients.on_request(1, 77)
    lines.add(Event(name="lease_attached", stream_id=FRONT, client_id=1), 0)
    lines.add(Event(name="lease_expired", stream_id=FRONT, client_id=2, owner=owner(9)), 0)
    assert taken(lines, WAIT_NS - 1) == []
    clients.declare(77, owner())
    first, second = taken(lines, WAIT_NS - 1)
    assert (first[0], first[1]["pid"], first[1]["user"], first[1]["stream"]) == ("lease_attached", 8812, "lab", "front")
    assert (second[0], second[1]["pid"], second[1]["identity"]) == ("lease_expired", 9, "seen")


def test_a_line_without_a_declaration_says_so() -> None:
    """After a moment: the client is another implementation's."""
    lines = trail(Clients())
    lines.add(Event(name="lease_attached", stream_id=FRONT, client_id=1), 0)
    ((_, fields),) = taken(lines, WAIT_NS)
    assert (fields["client_id"], fields["identity"]) == (1, "unknown")


def test_an_attach_waits_for_the_name_of_its_stream() -> None:
    """A producer names it after its attach; without a name the id has to do."""
    clients, names = Clients(), dict[int, str]()
    lines = trail(clients, names)
    lines.add(Event(name="lease_attached", stream_id=7, client_id=1, owner=owner()), 0)
    assert taken(lines, 1) == []
    names[7] = "camera"
    ((_, fields),) = taken(lines, 2)
    assert fields["stream"] == "camera"
    lines.add(Event(name="lease_attached", stream_id=8, client_id=1, owner=owner()), 0)
    ((_, fields),) = taken(lines, WAIT_NS)
    assert fields["stream"] is None


def test_a_client_that_asks_again_and_again_is_one_line() -> None:
    """And one more in a minute, with the number of times; another stream is another line."""
    clients = Clients()
    clients.declare(77, owner())
    lines = trail(clients)

    def refuse(client_id: int, stream_id: int, now_ns: int) -> None:
        clients.on_request(client_id, 77)
        lines.add(refusal_event(attach(client_id, stream_id), ResponseCode.REJECTED, "held"), now_ns)

    for number in range(1, 6):  # each attempt with a client id of its own
        refuse(number, FRONT, number)
    refuse(6, 7, 6)
    assert [fields["stream_id"] for _, fields in taken(lines, 10)] == [FRONT, 7]
    refuse(7, FRONT, AGAIN_NS + 1)
    ((name, fields),) = taken(lines, AGAIN_NS + 1)
    assert (name, fields["repeats"], fields["reason"]) == ("attach_refused", 4, "held")
