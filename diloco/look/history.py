"""`diloco history`: what happened to a run, and which operator did what."""

import dataclasses
from datetime import datetime

from rich.markup import escape
from rich.table import Table

from diloco.cli.opening import open_run
from diloco.common import wire
from diloco.common.tape import Entry, read_tape
from diloco.projections.acts import Event, act_of


async def happened(target: str, *, everything: bool) -> list[Event]:
    """What operators and aggregators did to a run, oldest first.

    Args:
        target: RUN.
        everything: with learners' joining and leaving.

    Raises:
        DilocoError: there is no such run.
    """
    async with open_run(target, reads=True) as opened:
        epoch = opened.context.epoch
        what = f"resumed on this tape, epoch {epoch}" if epoch else "created"
        found = [Event(opened.specification.created_at_s, what, "")]
        async for item in read_tape(opened.context):
            if isinstance(item, Entry):
                event = act_of(item.body, item.time_s)
                event = event or (_own(item.body, item.time_s) if everything else None)
                found += [event] if event else []
    return found


def _own(body: wire.Body, at_s: float) -> Event | None:
    match body:
        case wire.Join() as join:
            return Event(at_s, f"{join.learner} joined", "")
        case wire.Leave(fragments=()) as leave:
            return Event(at_s, f"{leave.learner} left", "")
    return None


def table(events: list[Event]) -> Table:
    """For people."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("when", "who", "what"):
        shown.add_column(title, overflow="fold", no_wrap=title == "when")
    for event in events:
        at = datetime.fromtimestamp(event.at_s).astimezone()
        shown.add_row(at.strftime("%Y-%m-%d %H:%M:%S"), escape(event.by), escape(event.what))
    return shown


def as_json(events: list[Event]) -> list[dict[str, object]]:
    """For programs."""
    return [dataclasses.asdict(event) for event in events]
