# SPDX-License-Identifier: Apache-2.0
"""What can become of a command that did not succeed."""

from __future__ import annotations

from tensorpool.errors import TensorPoolError


class CommandError(TensorPoolError):
    """A command to `tag` of `key` did not succeed: `reason` says why. Catch a subclass to know how far it came."""

    outcome = "failed"

    def __init__(self, tag: str, key: str, reason: str) -> None:
        super().__init__(tag, key, reason)
        self.text = f"{key} to {tag}: {self.outcome}: {reason}"
        self.tag = tag
        self.key = key
        self.reason = reason


class CommandUnanswered(CommandError):
    """No service accepted it in time; it was not run, unless the service answers after the timeout."""

    outcome = "no answer"


class CommandRejected(CommandError):
    """The service did not accept it, and did not run it."""

    outcome = "not accepted"


class CommandFailed(CommandError):
    """The service accepted it, and its handler raised an error."""

    outcome = "accepted, then failed"


class CommandUnfinished(CommandError):
    """The service accepted it; no result came in time, so it may still be running."""

    outcome = "accepted, no result yet"
