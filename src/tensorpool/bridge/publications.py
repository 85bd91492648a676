# SPDX-License-Identifier: Apache-2.0
"""What a bridge sends over the network: one publication for each stream, for all of its mappings.

A publication has a window of its own at the receiver, and those of one stream share a socket there. Eight publications
with 2 MiB each overflowed it, what Aeron sent again overflowed it, too, and 8 of 1,000 MiB/s were left. All mappings
turn on one thread, so an exclusive publication serves them.
"""

from __future__ import annotations

from tensorpool import aeron


class Publications:
    """Added when they are first asked for, closed together."""

    def __init__(self, transport: aeron.Client) -> None:
        self._transport = transport
        self._added: dict[tuple[str, int], aeron.Publication] = {}

    def get(self, channel: str, stream_id: int) -> aeron.Publication:
        """Raises TransportError."""
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
