# SPDX-License-Identifier: Apache-2.0
"""Structured logs: events with fields, never per frame.

As a library tensorpool logs through Python's `logging` under "tensorpool", so that a program decides what it wants to
see; a service of ours calls `configure` and writes one line per event to stderr. Only that needs structlog, which takes
longer to load than all the rest of a client. A service never waits for the reader of its log: lines that find no room
are dropped, counted, and followed by a line that says how many.

    console    for people
    json       an object for each event
    logfmt     key=value, the event first
    journald   logfmt behind the level as sd-daemon writes it (<6>), without a time: the journal has its own
    auto       console on a terminal, journald where stderr is the journal, json elsewhere
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, Self, TextIO

from tensorpool.line_writer import LineWriter
from tensorpool.peer_text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import structlog

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("auto", "console", "json", "logfmt", "journald")
FIELDS: Final = "tensorpool_fields"  # of a log record
FLUSH_S: Final = 1.0  # that an ending process waits for a reader
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3}
_chosen = "auto"
_writers: Final[dict[int, LineWriter]] = {}  # by descriptor


class Logger:
    """Logs events under one name, each with the logger's own fields.

    >>> Logger("driver", {"instance_id": "driver-01"}).info("lease_expired", stream_id=10000, lease_id=17)
    """

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self._logger = logging.getLogger(f"tensorpool.{name}")
        self._fields = dict(fields)

    def bind(self, **fields: object) -> Self:
        """The same with more fields."""
        bound = type(self).__new__(type(self))
        bound._logger, bound._fields = self._logger, self._fields | fields
        return bound

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        self._log(logging.ERROR, event, fields, exc_info)

    def _log(self, level: int, event: str, fields: dict[str, object], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            all_fields = self._fields | fields
            words = "".join(f" {name}={value!r}" for name, value in all_fields.items())
            extra = {FIELDS: {"event": event, **all_fields}}
            self._logger.log(level, "%s%s", event, words, exc_info=error, extra=extra, stacklevel=3)


def get_logger(name: str, **fields: object) -> Logger:
    """A logger under "tensorpool" whose every event carries `fields`."""
    return Logger(name, fields)


def choose_format(name: str) -> None:
    """How `configure` has events written."""
    global _chosen
    _chosen = name


def configure(level: str) -> None:
    """Write events of `level` and above to stderr, in the format that was chosen."""
    import structlog

    before: list[structlog.typing.Processor] = [
        _take_fields,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    writer = _writer(sys.stderr)
    handler = logging.StreamHandler(sys.stderr) if writer is None else _Handler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(_format())],
            foreign_pre_chain=before,
        )
    )
    root = logging.getLogger("tensorpool")
    root.handlers = [handler]
    set_level(level)
    root.propagate = False


class _Handler(logging.Handler):
    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Also called by `logging` when the process ends."""
        self._writer.flush(FLUSH_S)


def say(text: str, *, err: bool = False) -> None:
    """A line of a running service outside of its log, such as that it is ready."""
    stream = sys.stderr if err else sys.stdout
    writer = _writer(stream)
    if writer is None:
        print(text, file=stream, flush=True)
    else:
        writer.write(text)


def flush() -> bool:
    """Before the process ends: wait a moment for a slow reader. Whether everything is written."""
    return sum(not writer.flush(FLUSH_S) for writer in _writers.values()) == 0


def lines_dropped() -> int:
    """Lines of a service that were not written: its reader did not read those before them."""
    return sum(writer.dropped for writer in tuple(_writers.values()))


def _writer(stream: TextIO) -> LineWriter | None:
    """None for a stream in memory, as in a notebook: it has no reader that could stand still."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return None
    if not _writers:
        atexit.register(flush)
    return _writers.setdefault(fd, LineWriter(fd, _dropped_line))


def _dropped_line(count: int) -> str:
    words, fields = f"log_lines_dropped count={count}", {"event": "log_lines_dropped", "count": count}
    record = logging.makeLogRecord({"levelname": "WARNING", "levelno": logging.WARNING, "msg": words, FIELDS: fields})
    handlers = logging.getLogger("tensorpool").handlers
    return handlers[0].format(record) if handlers else words


def _format() -> str:
    if _chosen != "auto":
        return _chosen
    if sys.stderr.isatty():
        return "console"
    return "journald" if _is_journal(os.environ.get("JOURNAL_STREAM", "")) else "json"


def _is_journal(stream: str) -> bool:
    """Whether stderr is the connection to the journal that systemd names by device and inode."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def _renderer(name: str) -> structlog.typing.Processor:
    import structlog

    if name == "console":
        return structlog.dev.ConsoleRenderer()
    if name == "json":
        return structlog.processors.JSONRenderer()
    is_journal = name == "journald"
    first = ["event"] if is_journal else ["timestamp", "level", "event"]
    render = structlog.processors.LogfmtRenderer(key_order=first, drop_missing=True, bool_as_flag=False)

    def line(logger: object, method: str, event: structlog.typing.EventDict) -> str:
        prefix = ""
        if is_journal:
            event.pop("timestamp", None)
            prefix = f"<{_PRIORITIES.get(event.pop('level', ''), _PRIORITIES['info'])}>"
        return prefix + printable(render(logger, method, event))

    return line


def set_level(level: str) -> None:
    """Write events of `level` and above from now on."""
    logging.getLogger("tensorpool").setLevel(level.upper())


def level() -> str:
    """The level that is in effect."""
    return logging.getLevelName(logging.getLogger("tensorpool").getEffectiveLevel()).lower()


def _take_fields(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The event and its fields, in place of the words that other handlers get."""
    fields = getattr(event["_record"], FIELDS, None)
    return event if fields is None else {**event, **fields}
