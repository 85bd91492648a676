# SPDX-License-Identifier: Apache-2.0
"""The commands of all our services: ping, status, log-level, drain; pause, resume and reload where it can.

All but ping and status change the service, and are accepted from authorised senders only.
Wire §10.5: the service health announcement that a supervisor reads is `Service.state` in its `alive` events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from tensorpool import logs
from tensorpool.control.events import State
from tensorpool.control.service import Service, version


def add_common_commands(
    service: Service,
    *,
    status: Callable[[], Mapping[str, object]],
    drain: Callable[[], object],
    set_log_level: Callable[[str], object] = logs.set_level,
    pause: Callable[[], object] | None = None,
    resume: Callable[[], object] | None = None,
    reload: Callable[[], Iterable[str]] | None = None,
) -> None:
    """Add the commands that all services have in common.

    >>> add_common_commands(service, status=lambda: {"streams": 3}, drain=stop.set)

    `status` returns fields for the answer to `status`, as JSON. `drain` is called after the answer was sent, and ends
    the service as SIGTERM would. `pause` and `resume` may return a value to answer with. `reload` reads the
    configuration again and returns how it differs, line by line. All are called from `invoke`.
    """
    started_s = time.monotonic()

    @service.command("ping", is_query=True)
    def on_ping() -> str:
        return "pong"

    @service.command("status", is_query=True)
    def on_status() -> dict[str, object]:
        return {
            "service": service.name,
            "instance": service.instance,
            "pid": os.getpid(),
            "state": service.state,
            "version": version(),
            "uptime_s": round(time.monotonic() - started_s, 3),
            "log_level": logs.level(),
            **status(),
            "control": service.counts,
        }

    @service.command("log-level", authorised=True)
    def on_log_level(level: Literal["debug", "info", "warning", "error"] | None = None) -> str:
        if level is not None:
            set_log_level(level)
        return logs.level()

    def refuse_drain() -> str | None:
        return "it cannot be ended by an event: control.drain is 'never'" if service.config.drain == "never" else None

    @service.command("drain", refuse=refuse_drain, authorised=True)
    def on_drain(reason: str | None = None) -> str:
        if service.state is State.DRAINING:
            return "already draining"
        service.state = State.DRAINING
        service.after_answer(drain)
        return "draining"

    if reload is not None:
        to_reload = reload

        @service.command("reload", authorised=True)
        def on_reload() -> str:
            return "\n".join(to_reload()) or "nothing differs"

    def refuse_while_draining() -> str | None:
        return "it is draining" if service.state is State.DRAINING else None

    def change(state: State, act: Callable[[], object]) -> object:
        if service.state is state:
            return f"already {state}"
        found = act()
        service.state = state
        return state.value if found is None else found

    if pause is not None and resume is not None:
        to_pause, to_resume = pause, resume

        @service.command("pause", refuse=refuse_while_draining, authorised=True)
        def on_pause() -> object:
            return change(State.PAUSED, to_pause)

        @service.command("resume", refuse=refuse_while_draining, authorised=True)
        def on_resume() -> object:
            return change(State.RUNNING, to_resume)
