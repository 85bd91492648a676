# SPDX-License-Identifier: Apache-2.0
"""How every role opens its publications and subscriptions: no process that stalls holds up another one for long.

Wire §5, §15.11; decisions E20, F4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorpool._core import Client, ImageEvent, Publication, Subscription
from tensorpool.channel import Endpoint


def subscribe(
    client: Client, endpoint: Endpoint, on_image: Callable[[ImageEvent], object] | None = None
) -> Subscription:
    """An untethered subscription: no publisher waits for it. Raises TransportError."""
    return client.add_subscription(str(endpoint.uri.for_subscription()), endpoint.stream_id, on_image)


def publish(client: Client, endpoint: Endpoint, term: str | None = None) -> Publication:
    """An exclusive publication: no other publisher fills its log, of size `term` over IPC. Raises TransportError."""
    return client.add_publication(str(endpoint.uri.for_publication(term)), endpoint.stream_id, exclusive=True)


def distinct(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints without those whose messages another one receives already."""
    found: dict[object, Endpoint] = {}
    for endpoint in endpoints:
        found.setdefault(endpoint.place, endpoint)
    return list(found.values())
