# SPDX-License-Identifier: Apache-2.0
"""Who holds leases: what clients declare of themselves, and what the driver says of all of them.

    identify   command of a client, before it asks for a lease: its process
    leases     query: a page of the leases that there are; the driver also publishes such pages by itself
    revoke     command of an operator: end leases
    sender     to any service: who sends the command that follows

Ours: the specified messages say nothing of processes, and stay as they are. A client is recognised by the Aeron session
in which it sends its requests, which it names. Clients find the driver's service by the control stream on which they
ask for leases, since they need not know its instance id.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from tensorpool.channel import Endpoint
from tensorpool.control.config import MAX_TAG_BYTES
from tensorpool.errors import RemoteProtocolError
from tensorpool.peer_text import printable
from tensorpool.process_description import MAX_COMMAND, ProcessDescription, process_fields, seen
from tensorpool.process_identity import ProcessIdentity

KEY: Final = "identify"
LEASES: Final = "leases"
REVOKE: Final = "revoke"
SENDER: Final = "sender"
MAX_NAME: Final = 256

type Source = Literal["seen", "declared", "unknown"]


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `identify`, as JSON: the process whose requests come in this session of the control stream."""

    session_id: int
    process: ProcessIdentity
    description: ProcessDescription


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `sender`, as JSON, to any service: the process that sends the command of that correlation id."""

    correlation_id: int
    process: ProcessIdentity
    description: ProcessDescription

    def fields(self) -> dict[str, object]:
        """For the audit log: as this host sees the process, or else as it declares itself."""
        found = seen(self.process, self.description)
        return process_fields(self.process, found or self.description.bounded(), is_seen=found is not None)


class LeaseFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lease and its holder, as the driver knows them.

    `source` says how well: "seen" on the driver's host, "declared" by the client alone, or "unknown". `aeron_client` is
    the name that the media driver has for the client.
    """

    lease_id: int
    stream_id: int
    stream_name: str = ""
    client_id: int
    role: str
    since_ns: int  # since 1970
    keepalive_age_ms: int
    expires_in_ms: int
    source: Source = "unknown"
    pid: int | None = None
    user: str | None = None
    host: str = ""
    place: str = ""  # "" for the driver's own host; else "container" or "other host"
    program: str = ""
    command: str = ""
    aeron_client: str = ""

    @property
    def short(self) -> str:
        """The process for a column of a table: "lab 8812 acquire.py"; "" where it is not known."""
        return "" if self.pid is None else f"{self.user} {self.pid} {self.program}".strip()

    @property
    def holder(self) -> str:
        """The process in a few words."""
        known = [
            "" if self.pid is None else f"pid {self.pid}",
            "" if self.user is None else f"user {self.user}",
            self.command,
            f"on {self.host}" if self.place else "",
            "declared" if self.source == "declared" else "",
        ]
        return ", ".join(filter(None, known)) or self.aeron_client or "not declared"

    def bounded(self) -> LeaseFacts:
        """As it may be shown: any process may publish such a page."""
        return msgspec.structs.replace(
            self,
            stream_name=printable(self.stream_name, MAX_NAME),
            role=printable(self.role, MAX_NAME),
            user=None if self.user is None else printable(self.user, MAX_NAME),
            host=printable(self.host, MAX_NAME),
            place=printable(self.place, MAX_NAME),
            program=printable(self.program, MAX_NAME),
            command=printable(self.command, MAX_COMMAND),
            aeron_client=printable(self.aeron_client, MAX_NAME),
        )


class LeaseQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `leases` and `revoke`, as JSON: which leases; of `leases` also where the page begins."""

    lease_id: int | None = None
    client_id: int | None = None
    stream_id: int | None = None
    after: int = 0  # only leases with a higher id
    reason: str = ""  # of `revoke`


class LeasePage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `leases`, in the order of their ids; `next` is the `after` of the page that follows."""

    leases: tuple[LeaseFacts, ...]
    total: int  # of all leases
    next: int | None = None


def read_page(value: object) -> LeasePage:
    """A page as it may be shown. Raises RemoteProtocolError."""
    try:
        page = msgspec.json.decode(value if isinstance(value, str | bytes) else b"", type=LeasePage)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"{LEASES}: {error}") from None
    return msgspec.structs.replace(page, leases=tuple(facts.bounded() for facts in page.leases))


def driver_tag(control: Endpoint) -> str:
    """A tag of the driver that grants leases on this control stream.

    >>> driver_tag(Endpoint("aeron:ipc?term-length=4m", 1000))
    'service:driver-at:1000:ipc'
    """
    address, stream_id = control.place
    return ":".join(["service:driver-at", str(stream_id), *(part or "" for part in address)])[:MAX_TAG_BYTES]
