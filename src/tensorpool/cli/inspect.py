# SPDX-License-Identifier: Apache-2.0
"""`tensorpool inspect`: one stream from outside, without a lease. Wire §7, §8, §15.1; Driver Model §4.4."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorpool.cli import options

if TYPE_CHECKING:
    from tensorpool.diagnosis.inspection import EpochFacts, Inspection, LeaseFacts
    from tensorpool.diagnosis.regions import RegionFacts
    from tensorpool.diagnosis.slots import SlotFacts
    from tensorpool.supervisor.snapshot import ConsumerStatus


@click.command(name="inspect")
@click.argument("stream")
@click.option("--driver", "driver_instance_id", metavar="INSTANCE", help="Of the driver with this instance id.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True, metavar="S")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    metavar="S",
    help="How long to listen for leases and consumers.  [default: a little over one interval of theirs]",
)
@click.option("--json", "as_json", is_flag=True, help="Everything that is known, as one object of JSON.")
@options.connection_options
def command(
    stream: str,
    driver_instance_id: str | None,
    timeout: float,
    seconds: float | None,
    as_json: bool,
    aeron_dir: str | None,
    path: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Show STREAM, an id or a name: layout, files, epochs, leases, slots and consumers.

    Only looks: takes no lease, maps nothing, and nobody waits for it.
    """
    from tensorpool.client.client import connect
    from tensorpool.diagnosis.inspection import inspect_stream
    from tensorpool.diagnosis.listening import listening
    from tensorpool.diagnosis.streams import Wanted

    wanted = Wanted(stream, driver_instance_id)
    config = options.load_config(path, settings)
    with connect(aeron_dir, config=config) as client, listening(config, client.aeron_dir) as observer:
        found = inspect_stream(client, observer, wanted, timeout=timeout, seconds=seconds)
    if as_json:
        click.echo(_json(found))
    else:
        for line in _lines(found):
            click.echo(line)


def _json(found: Inspection) -> bytes:
    import msgspec

    plain = msgspec.to_builtins(found)
    for shown, region in zip(plain["regions"], found.regions, strict=True):
        if region.superblock is not None:
            shown["superblock"]["region_type"] = region.superblock.region_type.name
    return msgspec.json.encode(plain | {"name": _text(found.name), "problems": found.problems})


def _text(name: str | None) -> str | None:
    """As JSON and terminals can hold it: a name may have bytes that are no text."""
    return None if name is None else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _lines(found: Inspection) -> list[str]:
    from tensorpool.diagnosis.finding import size

    tags = f"  tags {', '.join(found.tags)}" if found.tags else ""
    layout = found.layout
    pools = ", ".join(f"{pool.pool_id}: {size(pool.stride_bytes)}" for pool in layout.pools)
    total = "" if layout.epoch_bytes is None else f"; {size(layout.epoch_bytes)} an epoch"
    lines = [
        f"{_text(found.name) or '(no name)'}  stream {found.stream_id}  driver {found.driver_instance_id}{tags}",
        _row("layout", f"{layout.nslots} slots; pools {pools or 'none'}; version {layout.layout_version}{total}"),
        _row("epoch", f"{found.epoch}, told by {found.told_by}"),
    ]
    status = found.status
    if status is not None:
        rate = "" if status.rate_hz is None else f", {status.rate_hz:.1f} Hz"
        lines.insert(1, _row("state", f"{status.state}{rate}; producer {found.producer_id or 'none'}"))
        if status.meta_version is not None:
            lines.insert(3, _row("metadata", f"version {status.meta_version}; {status.summary or 'no summary'}"))
    lines += [_row("", _epoch(epoch)) for epoch in reversed(found.epochs)]
    lines += _slots(found.slots)
    lines += [_row("leases" if first else "", _lease(lease)) for first, lease in _firsts(found.leases)] or [
        _row("leases", "none was kept alive while we listened")
    ]
    lines += [_row("consumers" if first else "", _consumer(each)) for first, each in _firsts(found.consumers)] or [
        _row("consumers", "none was heard of")
    ]
    texts = tuple(text for region in found.regions for text in _region(region))
    lines += [_row("regions" if first else "", text) for first, text in _firsts(texts)]
    lines += [_row("PROBLEM", problem) for problem in found.problems]
    return lines


def _epoch(epoch: EpochFacts) -> str:
    from tensorpool.diagnosis.finding import size

    made = "" if epoch.age_s is None else f", made {_age(epoch.age_s)} ago"
    owner = {True: ", its driver lives", False: ", its driver is gone", None: ""}[epoch.is_owner_alive]
    return f"{epoch.epoch} {epoch.state}{made}{owner}, {size(epoch.memory_bytes)} in memory"


def _slots(slots: SlotFacts | None) -> list[str]:
    from tensorpool.diagnosis.finding import size

    if slots is None:
        return [_row("slots", "the header ring cannot be read")]
    counts = f"{slots.committed} committed, {slots.in_progress} being written, {slots.never_written} never written"
    if slots.misplaced:
        counts += f", {slots.misplaced} with a seq that belongs elsewhere"
    lines = [_row("slots", counts)]
    if slots.newest_seq is None:
        return [*lines, _row("frames", "none yet")]
    reach = f"last seq {slots.newest_seq}, oldest {slots.oldest_seq}"
    if slots.span_s is not None and slots.rate_hz is not None and slots.holds_s is not None:
        reach += f"; {_age(slots.span_s)} at {slots.rate_hz:.1f} Hz, a full ring holds {_age(slots.holds_s)}"
    lines.append(_row("frames", reach))
    newest = slots.newest
    if newest is not None:
        shape = "x".join(map(str, newest.shape))
        age = _stamp_age(newest.timestamp_ns)
        lines.append(_row("", f"{shape} {newest.dtype.lower()}, {size(newest.nbytes)} in pool {newest.pool_id}{age}"))
    return lines


def _stamp_age(timestamp_ns: int) -> str:
    from tensorpool.diagnosis.regions import activity_age_s

    age_s = activity_age_s(timestamp_ns) if timestamp_ns else None
    return "" if age_s is None else f", stamped {_age(age_s)} ago"


def _lease(lease: LeaseFacts) -> str:
    if lease.lease_id is None:
        return f"{lease.role.lower()} client {lease.client_id}, as announced; no keepalive was heard"
    ends = "" if lease.expires_in_s is None else f", ends in {_age(lease.expires_in_s)} unless renewed"
    return f"{lease.role.lower()} client {lease.client_id}, lease {lease.lease_id}{ends}"


def _consumer(consumer: ConsumerStatus) -> str:
    lag = "lag unknown" if consumer.lag is None else f"lag {consumer.lag}"
    seq = "" if consumer.last_seq is None else f", last seq {consumer.last_seq}"
    rate = "" if consumer.rate_hz is None else f", {consumer.rate_hz:.1f} Hz"
    mode = "" if consumer.mode is None else f", mode {consumer.mode}"
    drops = f"drops gap {consumer.drops_gap}, late {consumer.drops_late}"
    return f"{consumer.consumer_id} {consumer.state}: {lag}{seq}, {drops}{rate}{mode}"


def _region(region: RegionFacts) -> list[str]:
    from tensorpool.diagnosis.finding import size

    file = region.file
    whose = "" if file is None else f"  {file.mode} {file.owner}:{file.group}  {size(file.size_bytes)}"
    if file is not None:
        whose += f" ({size(file.memory_bytes)} in memory)"
    lines = [f"{region.name}  {region.path}{whose}"]
    told = region.superblock
    if told is not None:
        life = "" if region.activity_age_s is None else f", last sign of life {_age(region.activity_age_s)} ago"
        alive = "alive" if region.is_owner_alive else "gone"
        lines.append(
            f"  {told.region_type.name} stream {told.stream_id} epoch {told.epoch} layout {told.layout_version} "
            f"pool {told.pool_id} nslots {told.nslots} slot_bytes {told.slot_bytes} stride_bytes {told.stride_bytes}"
        )
        lines.append(f"  written by pid {told.pid} ({alive}){life}")
    if region.problem:
        lines.append(f"  {region.problem}")
    return lines


def _firsts[T](items: tuple[T, ...]) -> list[tuple[bool, T]]:
    return [(index == 0, item) for index, item in enumerate(items)]


def _row(heading: str, text: str) -> str:
    return f"  {heading:<10} {text}"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for unit, scale in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
