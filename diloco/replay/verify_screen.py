"""Prints the result of verifying a run, on a terminal or as JSON."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape

from diloco.common.storage.tape import Unreadable
from diloco.replay import coverage
from diloco.replay.coverage import Tape
from diloco.replay.verify_run import Difference, Verified
from diloco.run.cli.screen import say_json

# The most differences that are shown in full.
SHOWN = 3
_COLOURS = {"verified": "green", "incomplete": "yellow", "wrong": "bold red"}
_WORDS = {"verified": "bit for bit", "incomplete": "incomplete", "wrong": "differences"}


def tell(tape: Tape, found: Verified, fragments: int, console: Console) -> None:
    """Prints the verdict and its coverage, differences and lost versions."""
    for difference in found.differences[:SHOWN]:
        show_difference(difference, console)
    for other in found.differences[SHOWN:]:
        record = f"fragment {other.fragment}, version {other.record.version}"
        console.print(f"[bold red]{record}[/]: {escape(other.what)}")
    for lost in found.lost[:SHOWN]:
        console.print(
            f"fragment {lost.fragment}, version {lost.version} (record {lost.record_seq}) cannot "
            f"be made again: {escape(lost.why)}",
        )
    for line in coverage.sentences(tape, found.versions):
        console.print(escape(line))
    said = coverage.verdict(tape, found.versions)
    console.print(
        f"run [bold]{tape.run}[/]: {found.versions.again} versions of {fragments} fragments merged "
        f"again from {found.records} records: [{_COLOURS[said]}]{_WORDS[said]}[/]",
    )


def tell_json(tape: Tape, found: Verified) -> None:
    """Prints the verdict as JSON."""
    differences: list[dict[str, Any]] = [
        {
            "fragment": one.fragment,
            "version": one.record.version,
            "record_seq": one.record_seq,
            "what": one.what,
        }
        for one in found.differences
    ]
    lost = [one._asdict() for one in found.lost]
    say_json(coverage.document(tape, found.versions, differences=differences, lost=lost))


def show_unreadable(records: Iterable[Unreadable], console: Console) -> None:
    """Prints the records that cannot be read, and so could not be compared."""
    for bad in records:
        console.print(
            f"[bold red]unreadable[/]: record {bad.seq} of fragment {bad.fragment}: {bad.why}"
        )


def show_difference(difference: Difference, console: Console) -> None:
    """Prints a difference: the record's place, and the figures that went into its version."""
    record = difference.record
    console.print(
        f"[bold red]fragment {difference.fragment}, version {record.version}[/] (record "
        f"{difference.record_seq}, made by {record.aggregator}, built on record {record.base_seq})",
    )
    console.print(f"  {escape(difference.what)}")
    facts = {
        "view": record.view_digest,
        "outer state": record.outer_digest,
        "view before": record.base_digest,
        "step": f"learning rate {record.learning_rate:g}, momentum {record.momentum:g}, settings "
        f"{record.policy.settings_seq or 'of the specification'}",
        "delta": record.delta.name if record.delta else "-",
        "snapshot": f"version {record.snapshot_version}: {record.snapshot.name}",
        "outer": f"version {record.outer_version}: {record.outer.name}",
    }
    for name, value in facts.items():
        console.print(f"  {name:<12} {escape(str(value))}")
    for taken in record.inputs:
        console.print(
            f"  input        {taken.learner}, life {taken.incarnation}, update {taken.seq}, at "
            f"{taken.stream_seq} on the tape: weight {taken.weight:g}, staleness "
            f"{taken.staleness}, discount {taken.discount:g}, clip {taken.clip:g}",
        )
        for shard in taken.shards:
            console.print(
                f"               {escape(shard.name)} ({shard.size_bytes} bytes, crc32c "
                f"{shard.crc32c:08x})",
            )
    console.print("  hint: runbooks/digest-mismatch.md")
