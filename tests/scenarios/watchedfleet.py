"""A fleet in virtual time with arrays and objects, and what status and `diloco why` say of it.

Learners, aggregators, merges and judgements are those of a real run; bus and clock are replaced, as
`bench/emulate.py` says. The machine is busy: it slows down for a while, and stands still.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from machinelab import digest_of, record_of

from bench.emulate import VirtualOwner, Weather, World, begin
from diloco.aggregator.core import rounds
from diloco.aggregator.core.events import Commit
from diloco.common.process.config import RunSettings, make_config
from diloco.common.protocol import shards, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.storage.store.memory import MemoryStore
from diloco.common.storage.tape import Recorded
from diloco.judge.remake_and_compare import copy_arrays
from diloco.learner.task import Task, scores
from diloco.replay import blame
from diloco.replay.blame_learners import judge
from diloco.replay.why_screen import BLAMED_ROUNDS, accusations
from diloco.run.agreement import shard_figures
from diloco.run.health_findings import judged
from diloco.run.model.view import GlobalModel
from diloco.run.observed import Observed
from diloco.run.state import Finding


def fleet_settings(seed: int, steps: int, sync: Mapping[str, Any], **sections: Any) -> RunSettings:
    """Settings of a run; `sections` are of others than `run` and `sync`."""
    trust = sections.pop("trust", "own")
    document = {
        "run": {"name": "lab", "steps": steps, "seed": seed, "trust": trust},
        "store": {"url": "unused"},
        "sync": {"block": 16, **sync},
        **sections,
    }
    return make_config(document, source="watchedfleet").settings()


class _Owner(VirtualOwner):
    """The aggregator of one fragment, which also keeps records."""

    world: "WatchedFleet"

    def _commit(self, commit: Commit) -> None:
        base = copy_arrays(self.arrays)
        super()._commit(commit)
        self.world.note(self, commit, base)


class WatchedFleet(World):
    """A run as status and why see it, without processes.

    Attributes:
        rounds: those that may be blamed, the newest last.
        first: the first records of each fragment.
    """

    owner = _Owner

    def __init__(self, run: RunSettings, task: Task, weather: Weather, *, busy: bool) -> None:
        self.seen = Observed("lab", 0, run)
        self.store, self.busy = MemoryStore(), busy
        self.rounds: list[tuple[Any, ...]] = []
        self.first: dict[int, list[tuple[int, wire.Record]]] = {}
        self._whims = np.random.default_rng([run.run.seed, 1])
        self._until_s, self._share = 0.0, 1.0
        start = begin(run, task)
        super().__init__(run, start, weather)
        self._model = GlobalModel(start.layout, task, {})

    def step_s(self, speed: float) -> float:
        """On a busy machine up to 32 times as long, and now and then far longer."""
        took_s, rng = super().step_s(speed), self._whims
        if not self.busy:
            return took_s
        while self._until_s <= self.time.now_s:
            self._until_s = self.time.now_s + float(rng.exponential(30.0))
            self._share = 8.0 ** -float(rng.random())
        stands_s = float(rng.exponential(20.0)) if rng.random() < 0.01 else 0.0
        return took_s * 4.0 ** float(rng.random()) / self._share + stands_s

    def forge(
        self, manifest: wire.Manifest, parts: tuple[Encoded, ...]
    ) -> tuple[wire.Manifest, tuple[Encoded, ...]]:
        """The same, stored."""
        stored = []
        for shard, part in zip(manifest.shards, parts, strict=True):
            data = shards.pack(manifest.codec, part, self.settings.sync.block)
            self.store.put(shard.name, data)
            stored.append(
                shard.model_copy(update={"crc32c": shards.crc32c(data), "size_bytes": len(data)})
            )
        return manifest.model_copy(update={"shards": tuple(stored)}), parts

    def note(self, owner: VirtualOwner, commit: Commit, base: Any) -> None:
        """A record was made, from the arrays `base`."""
        centered = owner.arrays.grid.centered
        share = rounds.step_share(commit.state, participation=False, centered=centered)
        record = record_of(owner.rules, commit, digest_of(commit.state.version)).model_copy(
            update={"learning_rate": share * self.settings.outer.learning_rate}
        )
        seq = self.time.next_seq()
        self.seen.note_record(Recorded(record, seq, self.time.now_s))
        chain = self.first.setdefault(record.fragment, [])
        if len(chain) < blame.FIRST_ROUNDS:
            chain.append((seq, record))
        if record.inputs:
            views = {one.rules.fragment: one.arrays.view.copy() for one in self.owners}
            self.rounds = [*self.rounds, (seq, record, base, views)][-BLAMED_ROUNDS:]

    def losses(self, views: Mapping[int, Any]) -> dict[str, float]:
        """Held-out losses of a model."""
        params = self._model.params([np.asarray(views[at]) for at in sorted(views)])
        return scores(self.start.task.evaluate(params)).losses()

    def harm(self) -> Iterator[Finding]:
        """Returns blame's findings on the newest rounds."""
        found = blame.Blame(blame.first_loss(self.first))
        history: Any = SimpleNamespace(
            store=self.store, layout=self.start.layout, settings_at=lambda _: self.settings
        )
        for seq, record, base, views in self.rounds:
            before, after = (
                self.losses(views | {record.fragment: view})
                for view in (base.view, views[record.fragment])
            )
            merged = blame._MergedRound(history, views, base, seq, record, (before, after))
            for by_slice, _ in merged.effects(
                lambda all_views: self.losses(dict(enumerate(all_views)))
            ):
                found.add(by_slice)
        sentences = {
            f"learner {one.learner}": one for one in judge(found.effects, found.slices, found.began)
        }
        yield from accusations(sentences, (), len(self.rounds))

    def accused(self, *, blamed: bool = True) -> list[Finding]:
        """Returns the findings that ask for action, of learners and of rounds."""
        context: Any = SimpleNamespace(
            layout=self.start.layout, settings=self.settings, store=self.store
        )
        self.seen.shards = shard_figures(context, self.seen.rounds)
        found = [*judged(self.seen.run(self.time.now_s), self.settings, copied=True)]
        found += self.harm() if blamed else ()
        return [
            one
            for one in found
            if one.severity in ("warning", "error")
            and (one.about.startswith("learner ") or one.about == "rounds")
            and not one.sentence.startswith(("silent", "started again"))
        ]
