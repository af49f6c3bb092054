"""Shrinks a failing seed to a minimal trace: fewer faults, learners and fragments, less time."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simrun import simulate
from simtrial import Outcome, Trial
from simworld import World

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import decode

# Processor time that shrinking may take, and events that a trace shows.
SHRINK_S = 120.0
SHOWN = 60


def shrink(outcome: Outcome) -> Outcome:
    """Returns the smallest run found in which the same checker fails, with its trace."""
    assert outcome.violation is not None
    began_s = time.process_time()
    best = outcome
    smaller = True
    while smaller and time.process_time() - began_s < SHRINK_S:
        smaller = False
        for plan in _smaller(best):
            found = simulate(plan)
            if found.violation is not None and found.violation.rule == outcome.violation.rule:
                best, smaller = found, True
                break
    return simulate(replace(best.plan, traced=True))


def _smaller(outcome: Outcome) -> Iterator[Trial]:
    """Yields plans that are one step smaller; plans that leave out the most come first."""
    plan = outcome.plan
    present = tuple(kind for kind in plan.kinds if plan.has(kind))
    if present != plan.kinds:
        yield replace(plan, kinds=present)
    half = len(present) // 2
    if half > 1:
        yield replace(plan, kinds=present[half:])
        yield replace(plan, kinds=present[:half])
    for kind in present:
        yield replace(plan, kinds=tuple(other for other in present if other != kind))
    for learners in range(1, plan.learners):
        yield replace(plan, learners=learners)
    for fragments in range(1, plan.fragments):
        yield replace(plan, fragments=fragments)
    if plan.minutes > 0.5:
        yield replace(plan, minutes=round(plan.minutes / 2, 2))


def commit() -> str:
    """Returns the commit that is checked out, with "-dirty" if files differ from it."""
    root = Path(__file__).parent
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def explain(outcome: Outcome) -> str:
    """Returns a text on the failure, and the last events that concern it."""
    plan, violation, world = outcome.plan, outcome.violation, outcome.world
    assert violation is not None
    lines = [
        f"seed {plan.seed} at commit {commit()} fails after {outcome.simulated_s:.1f} s:",
        f"  {violation}",
        f"  {plan.learners} learners, {plan.fragments} fragments, {plan.minutes:g} minutes, faults: "
        + (", ".join(kind for kind in plan.kinds if plan.has(kind)) or "none"),
    ]
    if world is not None and world.trace is not None:
        concerned = [event for event in world.trace if _concerns(violation.about, event)]
        lines += [_show(world, event) for event in concerned[-SHOWN:]]
    return "\n".join(lines)


Event = tuple[float, str, str, str]


def _concerns(about: str, event: Event) -> bool:
    """Whether an event concerns a violation's learner or fragment; True if `about` names neither."""
    _, actor, what, name = event
    if "heartbeat" in name or "rejected" in name:
        return False
    learners = [word.strip("'(),") for word in about.split() if "learner-" in word]
    for learner in (word.rsplit("=", 1)[-1].strip("'") for word in learners):
        return learner in (actor, *name.split("."), *name.split("/")) or "record" in name
    if about.startswith("fragment "):
        fragment = about.split()[1]
        tokens = {*name.split("."), *name.split("/")}
        return fragment in tokens or what in {"killed", "paused", "cut off"}
    return True


def _show(world: World, event: Event) -> str:
    at_s, actor, what, name = event
    if what.startswith("#"):
        stream = names.tape_stream(world.run_name)
        tape = world.broker._streams.get(stream)
        found = tape.log.get(int(what[1:])) if tape is not None else None
        if found is not None and found.subject == name:
            name = f"{name} {_describe(found)}"
    return f"  {at_s:9.3f}  {actor:<12} {what:<9} {name}"


def _describe(message: Message) -> str:
    """Returns a message of the tape in a few words."""
    try:
        body = decode(message.subject, message.payload)
    except WireError as error:
        return f"unreadable: {error}"
    match body:
        case wire.Manifest() as manifest:
            return (
                f"incarnation {manifest.incarnation} seq {manifest.seq} attempt "
                f"{manifest.attempt} on version {manifest.base_version}, {manifest.steps} steps to "
                f"{manifest.position}"
            )
        case wire.RecordPointer() as pointer:
            return pointer.body.name
        case wire.Record() as record:
            merged = [f"{i.learner}:{i.incarnation}:{i.seq}" for i in record.inputs]
            rejected = [f"{r.learner}:{r.incarnation}:{r.seq} {r.reason}" for r in record.rejected]
            return (
                f"{record.what} {record.version} by {record.aggregator} position "
                f"{record.position} merges {merged} rejects {rejected} ({record.reason})"
            )
    return ""
