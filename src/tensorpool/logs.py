# SPDX-License-Identifier: Apache-2.0
"""Structured logs: events with fields, never per frame.

As a library tensorpool logs through Python's `logging` under "tensorpool", so that a program decides what it wants to
see; a service of ours calls `configure` and writes one line per event to stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog

LEVELS: Final = ("debug", "info", "warning", "error")

_SHARED: Final[list[structlog.typing.Processor]] = [
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def get_logger(name: str, **fields: object) -> structlog.stdlib.BoundLogger:
    """A logger under "tensorpool" whose every event carries `fields`.

    >>> get_logger("driver", instance_id="driver-01").info("lease_expired", stream_id=10000, lease_id=17)
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"tensorpool.{name}"),
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger.bind(**fields) if fields else logger


def configure(level: str) -> None:
    """Write events of `level` and above to stderr: readable on a terminal, JSON lines elsewhere."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=_SHARED,
        )
    )
    root = logging.getLogger("tensorpool")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
