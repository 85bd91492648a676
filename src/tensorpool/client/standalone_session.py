# SPDX-License-Identifier: Apache-2.0
"""A consumer of a producer that announces its own regions: no driver, no lease; everything else as ever.

Nothing but fresh announces is mapped, with the checks of every mapping: containment, superblocks, activity, pid.
Wire §10.1.1, §10.1.2, §15.12, §15.21.
"""

from __future__ import annotations

from tensorpool.client import attachment as lease
from tensorpool.client.conductor import ClientConductor
from tensorpool.client.consumer_session import ConsumerSession, Preferences
from tensorpool.client.unleased import Unleased
from tensorpool.errors import TensorPoolError


class StandaloneSession(ConsumerSession):
    """The conductor's side of a `Consumer` that was made with `driver=False`."""

    attachment_type = Unleased

    def __init__(
        self,
        conductor: ClientConductor,
        wish: lease.Wish,
        name: str | None,
        preferences: Preferences,
        max_outstanding_seq_gap: int | None,
    ) -> None:
        super().__init__(conductor, wish, name, preferences, max_outstanding_seq_gap)
        if name is None:
            self.failure = TensorPoolError(f"no producer announces stream {wish.stream_id}; is it running?")

    def do_work(self, now_ns: int) -> int:
        work = super().do_work(now_ns)
        if self.attachment.is_attached:
            self._mapping.on_listening()
        return work

    def _take_new_id(self, now_ns: int) -> None:
        assert isinstance(self.attachment, Unleased)
        self.attachment.take_new_id()
        self._leave_private()
        self._next_ns = 0  # hello and QoS under the new id

    def _ask_what_is_current(self) -> None:
        self._hello()  # producers may answer it with an announce
