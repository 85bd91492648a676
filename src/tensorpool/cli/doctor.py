# SPDX-License-Identifier: Apache-2.0
"""`tensorpool doctor`: finds what is wrong on this host and how to fix it; `--gc` removes what ended processes left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from tensorpool.cli import format, options

if TYPE_CHECKING:
    from tensorpool.diagnosis.check_result import CheckResult
    from tensorpool.driver.config import DriverConfig
    from tensorpool.shm.leftovers import Outcome, Survey

COLOURS: Final = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command(name="doctor")
@click.option("--gc", "is_gc", is_flag=True, help="List what ended processes left behind, ask, and remove it.")
@click.option("--yes", "is_agreed", is_flag=True, help="With --gc: do not ask.")
@options.json_option("Print every finding, or with --gc everything found and removed, as JSON.")
@options.connection_options
def command(
    is_gc: bool,
    is_agreed: bool,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Examine this host: drivers, directories, permissions, memory, leftovers, software.

    Each finding is OK, WARN or FAIL, with the command that fixes it. Without --gc nothing is changed; --gc removes only
    what it has listed as dead, and nothing of other users. Exit code 1: something FAILs.
    """
    if is_agreed and not is_gc:
        raise click.UsageError("--yes goes with --gc")
    config = connection.load()
    if is_gc:
        _collect(config, connection.aeron_dir, is_agreed=is_agreed, as_json=as_json)
    else:
        _examine(config, connection.aeron_dir, as_json=as_json)


def _examine(config: DriverConfig, aeron_dir: str | None, *, as_json: bool) -> None:
    from tensorpool.diagnosis.all_checks import run_checks

    findings = []
    for finding in run_checks(config, aeron_dir):
        findings.append(finding)
        if not as_json:
            _show(finding)
    failures = sum(finding.level == "FAIL" for finding in findings)
    warnings = sum(finding.level == "WARN" for finding in findings)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"findings": findings, "failures": failures, "warnings": warnings}))
    else:
        click.echo(f"{failures} failures, {warnings} warnings, {len(findings) - failures - warnings} ok")
    sys.exit(1 if failures else 0)


def _show(finding: CheckResult) -> None:
    level = click.style(f"{finding.level:<4}", fg=COLOURS[finding.level], bold=True)
    click.echo(f"{level}  {finding.check:<14}  {finding.found}")
    if finding.remedy:
        click.echo(f"{'':<22}→ {finding.remedy}")


def _collect(config: DriverConfig, aeron_dir: str | None, *, is_agreed: bool, as_json: bool) -> None:
    from tensorpool.diagnosis.all_checks import place_of
    from tensorpool.diagnosis.leftovers import remove, survey_everything

    found = survey_everything(config, place_of(config, aeron_dir))
    if not as_json:
        _explain(found)
    outcomes: list[Outcome] = []
    if found.dead and _is_wanted(len(found.dead), is_agreed=is_agreed, as_json=as_json):
        for outcome in remove(found, config):
            outcomes.append(outcome)
            if not as_json:
                done = "removed" if outcome.is_removed else f"left ({outcome.reason})"
                click.echo(f"{done}  {outcome.leftover.path}")
    removed = sum(outcome.is_removed for outcome in outcomes)
    if as_json:
        _print_json(found, outcomes)
    elif outcomes:
        click.echo(f"{removed} of {len(found.dead)} removed")
    sys.exit(1 if any(outcome.is_failed for outcome in outcomes) else 0)


def _explain(found: Survey) -> None:
    for leftover in found.dead:
        click.echo(f"dead  {leftover.kind:<15}  {format.size(leftover.memory_bytes):>10}  {leftover.path}")
        for reason in leftover.why:
            click.echo(f"{'':<36}{reason}")
    for kept in found.kept:
        click.echo(f"left alone  {kept.path}: {kept.reason}")
    total = format.size(sum(leftover.memory_bytes for leftover in found.dead))
    click.echo(f"{len(found.dead)} dead, {total} in total; {found.living} belong to running processes")


def _is_wanted(count: int, *, is_agreed: bool, as_json: bool) -> bool:
    if is_agreed:
        return True
    if as_json or not sys.stdin.isatty():
        click.echo("error: there is no terminal to ask at: give --yes to remove what is listed as dead", err=True)
        sys.exit(1)
    return click.confirm(f"Remove these {count} directories?")


def _print_json(found: Survey, outcomes: list[Outcome]) -> None:
    import msgspec

    click.echo(
        msgspec.json.encode(
            {
                "dead": found.dead,
                "kept": found.kept,
                "living": found.living,
                "removed": [outcome.leftover.path for outcome in outcomes if outcome.is_removed],
                "left": [
                    {"path": outcome.leftover.path, "reason": outcome.reason}
                    for outcome in outcomes
                    if not outcome.is_removed
                ],
            }
        )
    )
