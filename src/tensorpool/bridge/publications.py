# SPDX-License-Identifier: Apache-2.0
"""What a bridge sends over the network: one publication for each stream, for all of its mappings.

A publication has a window of its own at the receiver, and those of one stream share a socket there. Eight publications
with 2 MiB each overflowed it, what Aeron sent again overflowed it, too, and 8 of 1,000 MiB/s were left. All mappings
turn on one thread, so an exclusive publication serves them.
"""

from __future__ import annotations

import secrets

from tensorpool import aeron
from tensorpool.channel import ChannelUri


class Publications:
    """Added when they are first asked for, closed together.

    All have one session id, unless their channel names one: a receiver that knows the sender of announces knows whose
    chunks and metadata to believe.
    """

    def __init__(self, transport: aeron.Client) -> None:
        self._transport = transport
        self._session_id = secrets.randbits(31)
        self._added: dict[tuple[str, int], aeron.Publication] = {}

    def get(self, uri: ChannelUri, stream_id: int) -> aeron.Publication:
        """Raises TransportError."""
        channel = str(uri.with_defaults({"session-id": str(self._session_id)}))
        found = self._added.get((channel, stream_id))
        if found is None:
            found = self._added[channel, stream_id] = self._transport.add_publication(
                channel, stream_id, exclusive=True
            )
        return found

    def close(self) -> None:
        for publication in self._added.values():
            publication.close()
        self._added.clear()
