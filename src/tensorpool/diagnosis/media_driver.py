# SPDX-License-Identifier: Apache-2.0
"""Is the media driver alive, where is it, which version? Everything else goes through it."""

from __future__ import annotations

from tensorpool import aeron
from tensorpool.diagnosis.check_result import CheckResult, fail, ok
from tensorpool.diagnosis.cnc import read_cnc
from tensorpool.errors import Closed, TransportError

CHECK = "media driver"
SILENT_S = 2.0  # twice the interval of heartbeats


def check_media_driver(aeron_dir: str) -> CheckResult:
    """Alive, dead, silent, or out of reach."""
    denial = aeron.explain_denial(aeron_dir)
    if denial is not None:
        found, _, remedy = denial.partition("; ")
        return fail(CHECK, found, remedy)
    facts = read_cnc(aeron_dir)
    if facts is None:
        found = f"none is at {aeron_dir} (no cnc.dat)"
        return fail(CHECK, found, "tensorpool driver    (it embeds one; or name its directory: --aeron-dir, AERON_DIR)")
    beat = "no heartbeat" if facts.heartbeat_age_s is None else f"last heartbeat {facts.heartbeat_age_s:.1f} s ago"
    who = f"{aeron_dir}, pid {facts.pid}, {beat}, CnC {facts.version}"
    if not facts.is_process_alive and facts.is_silent(SILENT_S):
        found = f"the one at {aeron_dir} is dead: pid {facts.pid} is gone, {beat}"
        return fail(
            CHECK, found, "tensorpool driver    (it takes the directory over; `tensorpool doctor --gc` removes it)"
        )
    if facts.is_silent(SILENT_S):
        found = f"the one at {aeron_dir} is silent: pid {facts.pid} runs, {beat}"
        return fail(
            CHECK, found, f"kill -CONT {facts.pid}    (is it stopped or starved? `ps -o stat,cmd -p {facts.pid}`)"
        )
    try:
        return ok(CHECK, f"alive at {who}; {_software(aeron_dir)}")
    except (TransportError, Closed) as error:
        return fail(CHECK, f"{who}, but no connection: {error}", f"ls -l {aeron_dir}; is it another user's?")


def _software(aeron_dir: str) -> str:
    """Its version, from one of its counters."""
    client = aeron.connect(aeron_dir, client_name="tensorpool doctor", driver_timeout_ms=int(SILENT_S * 1000))
    try:
        for reading in client.counters():
            label = reading.label
            if label.startswith("Aeron software:"):
                return label.removeprefix("Aeron software:").strip()
        return "version unknown"
    finally:
        client.close()
