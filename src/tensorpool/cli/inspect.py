# SPDX-License-Identifier: Apache-2.0
"""`tensorpool inspect`: shows one stream without taking a lease. Wire §7, §8, §15.1; Driver Model §4.4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorpool.cli import format, options
from tensorpool.cli.format import since

if TYPE_CHECKING:
    from tensorpool.diagnosis.inspection import EpochFacts, Inspection, LeaseFacts
    from tensorpool.diagnosis.regions import RegionFacts
    from tensorpool.diagnosis.slots import SlotFacts
    from tensorpool.supervisor.snapshot import ConsumerStatus


@click.command(name="inspect")
@click.argument("stream")
@click.option("--driver", "driver_instance_id", metavar="INSTANCE", help="Only streams of this driver.")
@options.timeout_option(2.0, "How long to look for the stream.", is_least_allowed=False)
@click.option(
    "--seconds",
    type=options.Number(min=0),
    metavar="S",
    help="How long to listen for leases and consumers.  [default: a little over one of their intervals]",
)
@options.json_option("Print everything as one JSON object.")
@options.connection_options
def command(
    stream: str,
    driver_instance_id: str | None,
    timeout: float,
    seconds: float | None,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Show STREAM, an id or a name: layout, files, epochs, leases, slots and consumers.

    Reads only: takes no lease, maps no memory, and no process waits for it.
    """
    from tensorpool.client.client import connect
    from tensorpool.diagnosis.announced_streams import observing
    from tensorpool.diagnosis.inspection import inspect_stream
    from tensorpool.diagnosis.streams import Wanted

    wanted = Wanted(stream, driver_instance_id)
    config = connection.load()
    with connect(connection.aeron_dir, config=config) as client, observing(config, client.aeron_dir) as observer:
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
    return msgspec.json.encode(plain | {"name": format.decodable(found.name), "problems": found.problems})


def _lines(found: Inspection) -> list[str]:
    tags = f"  tags {', '.join(found.tags)}" if found.tags else ""
    name = format.decodable(found.name) or "(no name)"
    layout = found.layout
    pools = ", ".join(f"{pool.pool_id}: {format.size(pool.stride_bytes)}" for pool in layout.pools)
    total = "" if layout.epoch_bytes is None else f"; {format.size(layout.epoch_bytes)} an epoch"
    lines = [
        f"{name}  stream {found.stream_id}  driver {found.driver_instance_id}{tags}",
        _row("layout", f"{layout.nslots} slots; pools {pools or 'none'}; version {layout.layout_version}{total}"),
        _row("epoch", f"{found.epoch}, from {found.reported_by}"),
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
        _row("leases", "no keepalive was received")
    ]
    lines += [_row("consumers" if first else "", _consumer(each)) for first, each in _firsts(found.consumers)] or [
        _row("consumers", "none reported")
    ]
    texts = tuple(text for region in found.regions for text in _region(region))
    lines += [_row("regions" if first else "", text) for first, text in _firsts(texts)]
    lines += [_row("PROBLEM", problem) for problem in found.problems]
    return lines


def _epoch(epoch: EpochFacts) -> str:
    made = "" if epoch.age_s is None else f", made {format.age(epoch.age_s)} ago"
    owner = {True: ", its driver is running", False: ", its driver has ended", None: ""}[epoch.is_owner_alive]
    return f"{epoch.epoch} {epoch.state}{made}{owner}, {format.size(epoch.memory_bytes)} in memory"


def _slots(slots: SlotFacts | None) -> list[str]:
    if slots is None:
        return [_row("slots", "the header ring cannot be read")]
    counts = f"{slots.committed} committed, {slots.in_progress} being written, {slots.never_written} never written"
    if slots.misplaced:
        counts += f", {slots.misplaced} with the seq of another slot"
    lines = [_row("slots", counts)]
    if slots.newest_seq is None:
        return [*lines, _row("frames", "none yet")]
    reach = f"last seq {slots.newest_seq}, oldest {slots.oldest_seq}"
    if slots.span_s is not None and slots.rate_hz is not None and slots.holds_s is not None:
        span, holds = format.age(slots.span_s), format.age(slots.holds_s)
        reach += f"; {span} at {slots.rate_hz:.1f} Hz, a full ring holds {holds}"
    lines.append(_row("frames", reach))
    newest = slots.newest
    if newest is not None:
        frame = f"{format.shape(newest.shape)} {newest.dtype.lower()}, {format.size(newest.nbytes)}"
        lines.append(_row("", f"{frame} in pool {newest.pool_id}{_stamp_age(newest.timestamp_ns)}"))
    return lines


def _stamp_age(timestamp_ns: int) -> str:
    from tensorpool.diagnosis.regions import activity_age_s

    age_s = activity_age_s(timestamp_ns) if timestamp_ns else None
    return "" if age_s is None else f", stamped {format.age(age_s)} ago"


def _lease(lease: LeaseFacts) -> str:
    if lease.lease_id is None:
        return f"{lease.role.lower()} client {lease.client_id}, from the announce; no keepalive was received"
    ends = "" if lease.expires_in_s is None else f", expires in {format.age(lease.expires_in_s)} unless renewed"
    process = "" if lease.holder is None else f"; {lease.holder.holder}, since {since(lease.holder.since_ns)}"
    return f"{lease.role.lower()} client {lease.client_id}, lease {lease.lease_id}{ends}{process}"


def _consumer(consumer: ConsumerStatus) -> str:
    lag = "lag unknown" if consumer.lag is None else f"lag {consumer.lag}"
    seq = "" if consumer.last_seq is None else f", last seq {consumer.last_seq}"
    rate = "" if consumer.rate_hz is None else f", {consumer.rate_hz:.1f} Hz"
    mode = "" if consumer.mode is None else f", mode {consumer.mode}"
    drops = f"drops gap {consumer.drops_gap}, late {consumer.drops_late}"
    return f"{consumer.consumer_id} {consumer.state}: {lag}{seq}, {drops}{rate}{mode}"


def _region(region: RegionFacts) -> list[str]:
    file = region.file
    whose = "" if file is None else f"  {file.mode} {file.owner}:{file.group}  {format.size(file.size_bytes)}"
    if file is not None:
        whose += f" ({format.size(file.memory_bytes)} in memory)"
    lines = [f"{region.name}  {region.path}{whose}"]
    block = region.superblock
    if block is not None:
        life = "" if region.activity_age_s is None else f", last activity {format.age(region.activity_age_s)} ago"
        alive = "running" if region.is_owner_alive else "ended"
        lines.append(
            f"  {block.region_type.name} stream {block.stream_id} epoch {block.epoch} layout {block.layout_version} "
            f"pool {block.pool_id} nslots {block.nslots} slot_bytes {block.slot_bytes} "
            f"stride_bytes {block.stride_bytes}"
        )
        lines.append(f"  written by pid {block.pid} ({alive}){life}")
    if region.problem:
        lines.append(f"  {region.problem}")
    return lines


def _firsts[T](items: tuple[T, ...]) -> list[tuple[bool, T]]:
    return [(index == 0, item) for index, item in enumerate(items)]


def _row(heading: str, text: str) -> str:
    return f"  {heading:<10} {text}"
