"""The scripts in sync/: what the learner's core does, event by event.

    rules fragments=2 sync.interval_steps=4 ...   before anything else; averaged=F: a fragment of
                                                  averaged state
    AT steps COUNT                                inner steps of 10 tokens, a second each, from AT
    AT wait                                       a step boundary without a step, as after the end
    published F SEQ at=AT                         the manifest is on the tape
    record F VERSION [resolves=SEQ] [seq=N]       a version's record has arrived; seq is on the tape;
                     [merged=SEQ]                 it, or one before it that was read, has an update
    restore F VERSION [resolves=SEQ]              a rollback's record has arrived
    verdict F [resolves=SEQ]                      likewise, of the version that is there
    round F VERSION | stop | leave | end

`=` shows each fragment: its version, what is unsent, what is in flight.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import check, files, split

from diloco.common.process.config import SyncSection
from diloco.common.protocol.layout import Rhythm, next_step
from diloco.learner.core import sync
from diloco.learner.core.events import (
    Adopt,
    Effect,
    End,
    Event,
    Finished,
    Leave,
    Published,
    Ready,
    Republish,
    RoundOpened,
    Send,
    Start,
    Stepped,
    Stop,
    sync_rules,
)

TOKENS = 10
EVENTS = {"stop": Stop, "leave": Leave, "end": End}


class Player:
    """Performs the events of one script."""

    def __init__(self) -> None:
        self.record_seq = 100
        self.versions: dict[int, int] = {}

    def perform(self, line: str) -> Iterator[str]:
        words, values = split(line)
        if words[0] == "rules":
            count = int(values.pop("fragments", "1"))
            averaged = (int(values.pop("averaged")),) if "averaged" in values else ()
            section = SyncSection(
                **{"interval_steps": 4, "min_steps": 2, "fragments": count}
                | {key.removeprefix("sync."): value for key, value in values.items()}
            )
            self.rules = replace(sync_rules(section), averaged=averaged)
            start = Start(0, digest_of(0), 100, 0)
            self.state = sync.begin(self.rules, (start,) * count)
            return
        yield from self._happen(words, values)
        yield f"= {', '.join(self._fragment(i) for i in range(len(self.state.fragments)))}"
        if sync.must_wait(self.rules, self.state):
            yield "= must wait"
        if (self.state.stopping or self.state.leaving) and sync.flushed(self.state):
            yield "= flushed"

    def _happen(self, words: list[str], values: dict[str, str]) -> Iterator[str]:
        match words:
            case at_s, "steps", count:
                for number in range(int(count)):
                    now_s = float(at_s) + number
                    effects = self._step(Stepped(now_s, TOKENS))
                    yield from (f"at {now_s:g}: {show(effect)}" for effect in effects)
                return
            case at_s, "wait":
                event = Stepped(float(at_s), 0, steps=0)
            case "published", fragment, seq:
                event = Published(float(values["at"]), int(fragment), int(seq))
            case ("record" | "restore") as what, fragment, version:
                self.versions[int(fragment)] = int(version)
                ready = self._ready(int(fragment), values)
                event = ready._replace(rolled_back=what == "restore")
            case "verdict", fragment:
                event = self._ready(int(fragment), values)
            case "round", fragment, version:
                event = RoundOpened(int(fragment), int(version))
            case [what]:
                event = EVENTS[what]()
            case _:
                raise AssertionError(f"no such event: {words}")
        yield from (show(effect) for effect in self._step(event))

    def _step(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = sync.step(self.rules, self.state, event)
        return effects

    def _ready(self, fragment: int, values: dict[str, str]) -> Ready:
        self.record_seq = int(values.get("seq", self.record_seq + 1))
        version = self.versions.get(fragment, 0)
        rules, step = self.rules, 0
        count = len(self.state.fragments)
        rhythm = Rhythm(
            fragment, count, rules.interval_steps, rules.warmup_steps, rules.warmup_interval_steps
        )
        for _ in range(version):
            step = next_step(rhythm, step)
        resolved = int(values.get("resolves", 0))
        return Ready(
            fragment,
            self.record_seq,
            version,
            digest_of(version),
            step,
            resolved,
            merged_seq=int(values.get("merged", 0)),
        )

    def _fragment(self, index: int) -> str:
        fragment = self.state.fragments[index]
        flying = fragment.in_flight
        parts = [
            f"{index}: version {fragment.version}",
            f"{sync.unsent_of(self.state, fragment).steps} unsent",
        ]
        if flying:
            parts.append(f"{flying.seq} {'in flight' if flying.announced_at_s else 'uploading'}")
        if fragment.final:
            parts.append("final")
        return " ".join(parts)


def digest_of(version: int) -> str:
    return f"{version:032x}"


def show(effect: Effect) -> str:
    match effect:
        case Send(fragment, seq, version, digest, steps, tokens, final):
            assert digest == digest_of(version)
            last = ", the last" if final else ""
            return (
                f"send {fragment}/{seq}: {steps} steps, {tokens} tokens on version {version}{last}"
            )
        case Adopt(ready, resolved, blended):
            own = ", own update resolved" if resolved else ""
            own += ", blended" if blended else ""
            how = "restore" if ready.rolled_back else "adopt"
            return (
                f"{how} {ready.fragment} version {ready.version} of record {ready.record_seq}{own}"
            )
        case Republish(fragment, seq, attempt):
            return f"announce {fragment}/{seq} again, attempt {attempt}"
        case Finished(fragments):
            return f"finished with {fragments}"
    raise AssertionError(effect)


@pytest.mark.parametrize("path", files("sync"), ids=lambda path: path.stem)
def test_sync(path: Path) -> None:
    check(path, Player().perform)
