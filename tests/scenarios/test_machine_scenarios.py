"""The scripts in machine/: what the aggregator's core does, event by event.

    rules quorum.min_learners=4 ...      before anything else; `cut=asked`: the leader answers late
    AT join NAME [holds=MODULE]          AT is in seconds; the fragment's module is ""
    AT update NAME SEQ [key=value ...]   NAME@3 speaks for incarnation 3; `again` repeats a manifest
    AT fetched NAME SEQ [norm=1]         AT failed NAME SEQ [REASON]
    AT redelivered POSITION              the tape delivers an earlier message once more
    AT live NAME | dead NAME | leave NAME | finished NAME | stop | timer | committed
    AT quarantine NAME | release NAME    the word of it is on the tape
    AT crash                             lose the machine, resume from the newest record
    AT read [COUNT]                      what is on the tape from that record's position on
    AT rounds NAME FIRST LAST            whole rounds of one learner's updates, effects not shown
    AT rollback VERSION                  an operator's record: the next version is that one again
    AT settings section.key=value ...    changed settings
    AT stored                            the open record is on the tape, but nobody hears of it
    AT cut                               the leader's last update is known, if it was not at once

`=` shows phase, version and the deadline whenever one of them has changed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from machinelab import BLOCK, Lab, lab_rules, make_manifest
from scripts import check, files, split

from diloco.aggregator.core import events, memory
from diloco.aggregator.core.events import (
    AskCut,
    Commit,
    Discard,
    Effect,
    Fetch,
    Ignored,
    Merge,
    OpenRound,
    Quarantine,
)
from diloco.aggregator.core.updates import UpdateId
from diloco.common.protocol import slices

FIELDS = {"step": "step_time_s"}


class Player:
    """Performs the events of one script."""

    def __init__(self) -> None:
        self.lab: Lab | None = None
        self.settings: dict = {}
        self.lives: dict[str, int] = {}
        self.shown = ""
        self.unread: list[events.Event] = []
        self.answers_late = False

    def perform(self, line: str) -> Iterator[str]:
        words, values = split(line)
        if words[0] == "rules":
            self.answers_late = values.pop("cut", "") == "asked"
            self.settings = {key: _value(value) for key, value in values.items()}
            self.lab = Lab(lab_rules(**self.settings))
            return
        self.lab = self.lab or Lab(lab_rules())
        at_s, verb, *rest = words
        shown = list(self._happen(float(at_s), verb, rest, values))
        yield from shown
        yield from self._status()

    def _happen(self, at_s: float, verb: str, rest: list[str], values: dict) -> Iterator[str]:
        lab = self.lab
        match verb, *rest:
            case ["committed"]:
                effects = lab.commit(at_s)
            case "rounds", who, first, last:
                for seq in range(int(first), int(last) + 1):
                    self._play_round(at_s, who, str(seq), values)
                return
            case ["stored"]:
                lab.store_record()
                return
            case "rollback", version:
                lab.roll_back(int(version))
                return
            case ["settings"]:
                changed = {key: _value(value) for key, value in values.items()}
                lab.rules = lab_rules(**self.settings | changed)
                effects = lab.step(lab.put(events.Changed, at_s))
            case "redelivered", position:
                effects = lab.step(next(e for e in lab.tape if e.stream_seq == int(position)))
            case ["crash"]:
                self.unread = lab.crash(at_s)
                return
            case "read", *count:
                for _ in range(int(count[0]) if count else len(self.unread)):
                    event = self.unread.pop(0)
                    yield f"| {self._told(event)}"
                    yield from (f"|   {self._show(effect)}" for effect in lab.step(event))
                return
            case _:
                effects = lab.step(self._event(at_s, verb, rest, values))
        yield from [self._show(effect) for effect in effects]
        yield from [self._show(effect) for effect in self._answer(at_s)]

    def _answer(self, at_s: float) -> tuple[Effect, ...]:
        """The leader's answer, if it was asked and answers at once."""
        if not self.lab.cut_asked or self.answers_late:
            return ()
        return self.lab.step(events.CutKnown(at_s, self.lab.last_update()))

    def _play_round(self, at_s: float, who: str, seq: str, values: dict) -> None:
        lab = self.lab
        lab.step(self._event(at_s, "update", [who, seq], {"base": lab.state.version}))
        lab.step(self._event(at_s, "fetched", [who, seq], values))
        while not lab.open_commit:
            lab.step(events.Timer(max(at_s, lab.deadline() or 0.0)))
            self._answer(at_s)
        lab.commit(at_s)

    def _event(self, at_s: float, verb: str, rest: list[str], values: dict) -> events.Event:
        lab = self.lab
        match verb, *rest:
            case "join", name:
                holds = tuple(values.get("holds", "").split())
                event = lab.put(events.Joined, at_s, name, holds)
                self.lives[name] = event.stream_seq
                return event
            case "update", who, seq:
                name, life = self._who(who)
                size_bytes = int(values.pop("bytes", 0))
                changes = {FIELDS.get(k, k): _value(v) for k, v in values.items()}
                honest = make_manifest(lab.rules, name, life, int(seq)).shards
                sent = make_manifest(lab.rules, name, life, int(seq), **_spoilt(honest, changes))
                return lab.put(events.Announced, at_s, sent, size_bytes)
            case "undecoded", name:
                return lab.put(events.Undecoded, at_s, name, int(values["bytes"]))
            case "again", who, seq:
                update = UpdateId(*self._who(who), int(seq))
                manifests = [e.manifest for e in lab.tape if isinstance(e, events.Announced)]
                sent = next(m for m in manifests if (m.learner, m.incarnation, m.seq) == update)
                again = sent.model_copy(update={"attempt": sent.attempt + 1})
                return lab.put(events.Announced, at_s, again)
            case "fetched", who, seq:
                update = UpdateId(*self._who(who), int(seq))
                return events.Fetched(at_s, update, float(values.get("norm", 1)))
            case "failed", who, seq, *reason:
                update = UpdateId(*self._who(who), int(seq))
                return events.Failed(at_s, update, *(reason or ["crc32c"]), "wrong bytes")
            case ("live" | "dead") as how, who:
                return events.Liveness(at_s, *self._who(who), how == "live")
            case ("leave" | "finished") as how, who:
                what = events.Departed if how == "leave" else events.Finished
                return lab.put(what, at_s, *self._who(who))
            case ("quarantine" | "release") as how, name:
                return lab.put(events.Quarantined, at_s, name, how == "quarantine")
            case ["stop"]:
                return lab.put(events.Stopped, at_s)
            case ["timer" | "cut" as what]:
                late = events.CutKnown(at_s, lab.last_update())
                return events.Timer(at_s) if what == "timer" else late
        raise AssertionError(f"no such event: {verb} {rest}")

    def _who(self, who: str) -> tuple[str, int]:
        name, at, life = who.partition("@")
        return name, int(life) if at else self.lives[name]

    def _name(self, manifest) -> str:
        current = self.lives.get(manifest.learner) == manifest.incarnation
        life = "" if current else f"@{manifest.incarnation}"
        return f"{manifest.learner}{life}/{manifest.seq}"

    def _told(self, event: events.Event) -> str:
        match event:
            case events.Announced(_, stream_seq, manifest, _):
                return f"{stream_seq}: update {self._name(manifest)}"
            case _:
                learner = getattr(event, "learner", "")
                return f"{event.stream_seq}: {type(event).__name__.lower()} {learner}".rstrip()

    def _show(self, effect: Effect) -> str:
        match effect:
            case Fetch(_, manifest):
                return f"fetch {self._name(manifest)}"
            case AskCut():
                return f"cut at {self.lab.last_update()}"
            case Discard():
                return "discard the sum"
            case OpenRound(version):
                return f"open the round of version {version}"
            case Merge(taken):
                extra = ""
                if taken.staleness:
                    extra += f", {taken.staleness} stale x {taken.discount:.3g}"
                if taken.clip != 1:
                    extra += f", clipped x {taken.clip:.3g}"
                return f"merge {self._name(taken.manifest)}, weight {taken.weight:g}{extra}"
            case Commit(what, reason, final, _, state):
                parts = [f"merged {' '.join(self._name(t.manifest) for t in state.admitted)}"]
                parts = parts if state.admitted else []
                parts += [
                    f"rejected {self._name(r.manifest)} ({r.reason}: {r.detail})"
                    for r in state.rejected
                ]
                parts.append(f"position {memory.position(state)}")
                version = f" {state.version + 1}" if what == "version" else ""
                last = ", the last record" if final else ""
                return f"commit {what}{version}, {reason}{last}: {', '.join(parts)}"
            case Ignored(learner, reason, detail):
                return f"ignore {learner} {detail}: {reason}"
            case Quarantine(learner, reason):
                return f"shut out {learner}: {reason}"

    def _status(self) -> Iterator[str]:
        state, due_s = self.lab.state, self.lab.deadline()
        timer = "" if due_s is None else f", timer at {due_s:g}"
        final = ", final" if state.final else ""
        shown = f"= {state.phase} at version {state.version}{final}{timer}"
        if shown != self.shown:
            self.shown = shown
            yield shown


def _value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def _spoilt(honest: tuple, changes: dict) -> dict:
    """`shard=name`, `size` or `cut` spoils the first shard; `layout=other` is a digest."""
    spoil = changes.pop("shard", None)
    if spoil:
        change = {
            "name": {"name": "lab/learner/b/update/0/1-1.0"},
            "size": {"size_bytes": honest[0].size_bytes + 1},
            "cut": {"slices": slices.of_range(0, 1024 - BLOCK, BLOCK)},
        }[spoil]
        changes["shards"] = (honest[0].model_copy(update=change), *honest[1:])
    for key in ("base_digest", "held_digest", "layout"):
        if changes.get(key) == "other":
            changes[key] = "f" * 32
    return changes


@pytest.mark.parametrize("path", files("machine"), ids=lambda path: path.stem)
def test_machine(path: Path) -> None:
    check(path, Player().perform)
