"""Rounds over everything that could break them, by the planner's simulation of the real machines.

    .venv/bin/python -m bench.rounds [--rounds 60] [--json FILE] [--against FILE]

Each cell: updates in a version, interval in steps of the fastest learner, mean staleness, reads for
each merged update, and how long an update waits for the close of its round, on average and at
worst, in such steps, once the first ten versions are made. `--against` shows the cells that a file
of another commit has beside them, and fails where this one is worse, by 3 % of interval or wait.
Time is virtual: the same commit gives the same cells. `bench/rounds.json` has those of this one.

    .venv/bin/python -m bench.rounds events [--profile]

Events per second of the aggregator's core alone. Sixteen learners in step; each round is 16
manifests, 16 verified payloads and a commit. No IO, no arrays, no decoding: what is left is the
machine itself. A second table has larger fleets: a version's cost should grow as they do, and no
faster. A third has the bytes of such fleets' records, and the time to write and to read one: of a
version that is of one update, and of one that is of everybody's. Beside them are the time to make
the table of answers, the bytes that one learner reads instead (word and answers), and the time that
it takes to decode these.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.harness import run_part
from diloco.aggregator.core import events, machine, memory
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.events import Fetch
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import UpdateId
from diloco.common.process.config import RunSettings, make_config, parse_settings
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.plan import simulated_rounds as plan_rounds
from diloco.plan.outages import Trace, always
from diloco.plan.simulated_rounds import PlannedAggregator, PlannedLearner, RoundTotals
from tests.records import make_input, make_record

# --- Rounds


INTERVAL = 24
STEP_S = 0.25
# Versions that are made before anything is counted: averages settle, learners fall into phase.
SETTLE = 10
SLOWEST = 1.5
# Of a cell whose aggregator begins late: the step at which it does, and the versions that count.
BEGINS = 41
AFTER = 5
# Reads a step of the fastest learner. Five: 12 B in 24 fragments at 10 Gbit/s, scaled.
READS = {"fast": 200.0, "slow": 5.0}
# What a cell may be worse by: in one of 50 versions the last update may miss it.
MARGIN = 0.02
# What interval and wait may grow by; and steps of a wait that are none.
GROWTH = 0.03
NO_STEPS = 0.01


class RoundsCase(NamedTuple):
    """One cell's fleet and settings; `store_steps` that storing a delta takes.

    `late`: nobody takes updates before step `BEGINS`, and the next versions are counted.
    """

    learners: int
    least: int = 1
    min_steps: int = 6
    phases: str = "together"
    reads: str = "slow"
    speeds: str = "equal"
    store_steps: float = 0.08
    late: bool = False


class Cell(NamedTuple):
    """The result of a case."""

    merged: float
    interval: float
    staleness: float
    reads: float
    wait: float
    worst: float


def cases() -> list[RoundsCase]:
    """The table of the scale, then every combination for 16 learners."""
    scale = [
        *(RoundsCase(learners) for learners in (8, 16, 32, 64)),
        RoundsCase(8, store_steps=1.6),
        RoundsCase(8, reads="fast", speeds="unequal"),
        RoundsCase(8, reads="fast", speeds="unequal", late=True),
        RoundsCase(16, reads="slow", speeds="unequal", late=True),
    ]
    choices = product(
        (1, 8, 16), (6, INTERVAL), ("together", "spread"), READS, ("equal", "unequal")
    )
    return [*scale, *(RoundsCase(16, *chosen) for chosen in choices)]


def settings_of(case: RoundsCase) -> RunSettings:
    """Of the run."""
    return parse_settings(
        {
            "run": {"name": "rounds", "steps": 1},
            "sync": {"interval_steps": INTERVAL, "min_steps": case.min_steps},
            "quorum": {"min_learners": case.least},
        }
    )


def workers_of(case: RoundsCase, horizon_s: float) -> list[PlannedLearner]:
    """The fleet; where phases are spread, learners begin one after another within H steps."""
    found = []
    for number in range(case.learners):
        share = number / case.learners
        slower = 1 + (SLOWEST - 1) * share if case.speeds == "unequal" else 1.0
        trace = always(horizon_s)
        if case.phases == "spread" and number:
            begins_s = share * INTERVAL * STEP_S
            trace = Trace(horizon_s, np.asarray([0.0, begins_s]), np.asarray([0.0, 1.0]), (), ())
        worker = PlannedLearner(
            step_s=STEP_S * slower, step_tokens=100, upload_s=0.1 * STEP_S,
            download_s=0.1 * STEP_S, trace=trace,
        )  # fmt: skip
        found.append(worker)
    return found


def simulated(case: RoundsCase, workers: list[PlannedLearner], horizon_s: float) -> RoundTotals:
    """The rounds of a case."""
    aggregator = PlannedAggregator(
        read_s=STEP_S / READS[case.reads], make_s=0.02 * STEP_S,
        store_s=case.store_steps * STEP_S, message_s=0.005,
        away_s=(0.0, BEGINS * STEP_S if case.late else 0.0),
    )  # fmt: skip
    return plan_rounds.simulate(
        settings_of(case), workers, aggregator=aggregator, horizon_s=horizon_s,
        rng=np.random.default_rng(0),
    )  # fmt: skip


def cell(case: RoundsCase, rounds: int) -> Cell:
    """Simulate a case; the first versions are left out."""
    horizon_s = rounds * INTERVAL * STEP_S
    found = simulated(case, workers_of(case, horizon_s), horizon_s)
    first, last = (1, 1 + AFTER) if case.late else (SETTLE, found.versions)
    merged, times_s = found.merged[first:last], found.committed_s[first:last]
    some = slice(sum(found.merged[:first]), sum(found.merged[:last]))
    staleness, waits_s = found.staleness[some], found.waits_s[some]
    return Cell(
        float(np.mean(merged)),
        float(np.mean(np.diff(times_s))) / STEP_S,
        float(np.mean(staleness)),
        found.reads / len(found.staleness),
        float(np.mean(waits_s)) / STEP_S,
        max(waits_s) / STEP_S,
    )


def worse(before: Cell, after: Cell) -> bool:
    """Whether versions hold fewer updates, come further from every H steps, or are waited for."""
    fewer = after.merged < before.merged * (1 - MARGIN)
    off = abs(after.interval - INTERVAL) > abs(before.interval - INTERVAL) + MARGIN * INTERVAL
    longer = any(
        now > was * (1 + GROWTH) + NO_STEPS
        for was, now in (
            (before.interval, after.interval),
            (before.wait, after.wait),
            (before.worst, after.worst),
        )
    )
    return fewer or off or longer


def rounds_main() -> None:
    """Measure, print, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the cells to this file")
    parser.add_argument("--against", type=Path, help="cells of another commit")
    options = parser.parse_args()
    before = _read(options.against) if options.against else {}
    print("| " + " | ".join((*RoundsCase._fields, *Cell._fields, "before")) + " |")
    found: list[tuple[RoundsCase, Cell]] = []
    for case in cases():
        found.append((case, cell(case, options.rounds)))
        print(_row(*found[-1], before.get(case)), flush=True)
    if options.json:
        document: list[Any] = [[list(case), list(found_cell)] for case, found_cell in found]
        options.json.write_text(json.dumps(document))
    bad = [case for case, after in found if case in before and worse(before[case], after)]
    for case in bad:
        print(f"worse than before: {case}")
    sys.exit(1 if bad else 0)


def _read(path: Path) -> dict[RoundsCase, Cell]:
    return {RoundsCase(*case): Cell(*found) for case, found in json.loads(path.read_text())}


def _row(case: RoundsCase, after: Cell, before: Cell | None) -> str:
    cells = [str(field) for field in case] + _figures(after)
    cells.append(", ".join(_figures(before)) if before else "")
    return "| " + " | ".join(cells) + " |"


def _figures(found: Cell) -> list[str]:
    merged, interval, staleness, reads, wait, worst = found
    rest = [f"{interval:.1f}", f"{staleness:.2f}", f"{reads:.2f}", f"{wait:.1f}", f"{worst:.1f}"]
    return [f"{merged:.2f}", *rest]


# --- Events


LEARNERS = 16
FRAGMENTS = 24
BLOCK = 64
ROUNDS = 400
REPEATS = 5
FLOOR_EVENTS_PER_S = 10_000
FLEETS = (16, 128, 1000, 4000)
RECORDED = (*FLEETS, 10_000)


class Measured(NamedTuple):
    """One run of the machine: how many events it took, and the CPU seconds they needed."""

    events: int
    seconds: float


def make_rules(shard_elements: int) -> formulas.FragmentRules:
    """Rules of the first of 24 fragments of a model of 400 M parameters."""
    document = {
        "run": {"name": "bench", "steps": (1 << 31) - 1},
        "sync": {"fragments": FRAGMENTS, "interval_steps": 24, "shard_elements": shard_elements},
        "quorum": {"min_learners": LEARNERS},
        "store": {"url": "unused"},
    }
    tensors = [
        Tensor(name=f"layer{i}", shape=(4096, 4096), dtype="float32") for i in range(FRAGMENTS)
    ]
    layout = make_layout(tensors, fragments=FRAGMENTS, block=BLOCK)
    settings = make_config(document, source="bench").settings()
    return formulas.fragment_rules(settings, layout, 0)


def manifest(rules: formulas.FragmentRules, learner: int, seq: int, base: int) -> wire.Manifest:
    """A manifest as an honest learner sends it; its incarnation is its place in the fleet."""
    name, incarnation = f"learner-{learner}", learner + 1
    cuts = shards.shard_ranges(rules.size, rules.block, rules.shard_elements)
    return wire.Manifest(
        run=rules.run,
        learner=name,
        epoch=0,
        incarnation=incarnation,
        seq=seq,
        fragment=rules.fragment,
        base_version=base,
        base_digest=f"{base:032x}",
        layout=rules.layout,
        codec="int4",
        shards=tuple(
            wire.Shard(
                name=names.shard(rules.run, name, rules.fragment, 0, incarnation, seq, index),
                size_bytes=shards.shard_bytes("int4", stop - start, rules.block),
                crc32c=0,
                slices=slices.of_range(start, stop, rules.block),
            )
            for index, (start, stop) in enumerate(cuts)
        ),
        tokens=24 * 8192,
        steps=24,
        position=seq * 24,
        local_step=seq * 24,
        loss=2.0,
        step_time_s=1.0,
        encode_s=0.01,
        upload_s=0.1,
        attempt=0,
        final=False,
    )


def play(rules: formulas.FragmentRules, manifests: list[list[wire.Manifest]]) -> Measured:
    """Every round of the run, from joins to the last commit."""
    state = beginning()
    count = 0
    began_s = time.process_time()
    for learner in range(len(manifests[0])):
        state, _ = machine.step(rules, state, events.Joined(1.0, learner + 1, f"learner-{learner}"))
        count += 1
    stream_seq = count
    for number, sent in enumerate(manifests, start=1):
        now_s = number * 24.0
        waiting: list[UpdateId] = []
        for body in sent:
            stream_seq += 1
            state, effects = machine.step_at(
                rules, state, events.Announced(now_s, stream_seq, body), now_s
            )
            waiting += [effect.update for effect in effects if isinstance(effect, Fetch)]
        for update in waiting:
            state, _ = machine.step(rules, state, events.Fetched(now_s + 0.5, update, 3.0))
        assert state.phase == "closing", "the last of the fleet completes the round"
        stream_seq += 1
        made = events.Made(now_s + 0.55, f"{number:032x}")
        state, _ = machine.step(rules, state, made)
        committed = events.Committed(now_s + 0.6, stream_seq)
        state, _ = machine.step(rules, state, committed)
        count += len(sent) + len(waiting) + 2
    assert state.version == len(manifests)
    return Measured(count, time.process_time() - began_s)


def beginning() -> State:
    """The machine at version 0, before anybody has joined."""
    return State(
        version=0,
        record_seq=1,
        view_digest=f"{0:032x}",
        seen_seq=0,
    )


def fleet(
    rules: formulas.FragmentRules, learners: int = LEARNERS, rounds: int = ROUNDS
) -> list[list[wire.Manifest]]:
    """The manifests of each round."""
    return [
        [manifest(rules, learner, number, number - 1) for learner in range(learners)]
        for number in range(1, rounds + 1)
    ]


def record(learners: int, merged: int) -> wire.Record:
    """Of a fleet of as many, and a version of so many updates; each has 16 segments."""
    everybody = range(learners)
    member: dict[str, Any] = {
        "incarnation": 1, "live": True, "left": False, "final": False, "step_time_s": 1.25,
        "weight": 1e6 / 3, "heard_at_s": 1e9 / 3, "offences": 0, "tokens_per_step": 8192.0,
        "read_at_s": 1e9 / 3, "speed": 1 / 3, "unused_s": 1 / 3, "norm": 1 / 3, "missed": 0,
        "not_holding": (),
    }  # fmt: skip
    shard = wire.Shard(
        name=names.shard("bench", f"learner-{learners}", 0, 0, 1, 1, 0),
        size_bytes=1, crc32c=1 << 31, slices=slices.of_range(0, 1 << 20, BLOCK),
    )  # fmt: skip
    policy = memory.beginning().model_copy(
        update={
            "members": tuple(wire.MemberState(learner=f"learner-{i}", **member) for i in everybody),
            "marks": tuple(
                wire.Mark(learner=f"learner-{i}", incarnation=1 << 20, seq=99, stream_seq=1 << 24)
                for i in everybody
            ),
            "allowances": tuple(
                wire.Allowance(learner=f"learner-{i}", left=1 / 3, at_s=1e9 / 3) for i in everybody
            ),
        }
    )
    inputs = tuple(
        make_input(
            learner=f"learner-{i}",
            incarnation=1 << 20,
            seq=99,
            shards=(shard,),
            coefficients=bytes(32),
        )
        for i in range(merged)
    )
    return make_record(policy=policy, inputs=inputs)


def _print_records() -> None:
    columns = (
        "learners", "updates", "record kB", "encode ms", "decode ms", "table ms", "own bytes",
        "own ms",
    )  # fmt: skip
    print("\n" + " ".join(f"{name:>12}" for name in columns))
    for learners in RECORDED:
        for merged in (1, learners):
            made = record(learners, merged)
            encoded = wire.encode(made)
            encode_s = _processor_s(partial(wire.encode, made))
            decode_s = _processor_s(partial(wire.decode, wire.Record, encoded))
            table_s = _processor_s(partial(wire.with_answers, made, encoded))
            own_bytes, own_s = _own_part(made, encoded)
            print(
                f"{learners:>12} {merged:>12} {len(encoded) / 1e3:>12.1f} {1e3 * encode_s:>12.1f} "
                f"{1e3 * decode_s:>12.1f} {1e3 * table_s:>12.1f} {own_bytes:>12} "
                f"{1e3 * own_s:>12.3f}"
            )


def _own_part(made: wire.Record, encoded: bytes) -> tuple[int, float]:
    """Bytes that a learner reads of a record in an object, and the time to decode them."""
    data, answers = wire.with_answers(made, encoded)
    body = wire.ObjectRef(name=made.snapshot.name, size_bytes=len(data), crc32c=0)
    pointer = wire.RecordPointer(
        word=wire.word_of(made), body=body, answers=answers, attempt_id="0" * 32
    )
    told, learner = wire.encode(pointer), "learner-0"
    start, stop = wire.answers_range(pointer, learner)

    def read() -> None:
        found = wire.decode_record(told)
        assert isinstance(found, wire.RecordPointer)
        span = wire.answers_range(found, learner)
        assert wire.answer_in(found, data[slice(*span)], learner, 1 << 20).resolved_seq == 99

    return len(told) + stop - start, _processor_s(read)


def _processor_s(work: Callable[[], object]) -> float:
    """Of the fastest of five."""
    taken = []
    for _ in range(5):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return min(taken)


def events_main() -> None:
    """Print the tables; `--profile` shows where the time goes."""
    print(f"{'updates of':>12} {'events':>8} {'events/s':>10} {'us/event':>9}  floor")
    for label, shard_elements in (("1 shard", 1 << 26), ("16 shards", 1 << 20)):
        rules = make_rules(shard_elements)
        manifests = fleet(rules)
        best = min((play(rules, manifests) for _ in range(REPEATS)), key=lambda run: run.seconds)
        rate = best.events / best.seconds
        verdict = "ok" if rate >= FLOOR_EVENTS_PER_S else f"below {FLOOR_EVENTS_PER_S:,}"
        print(f"{label:>12} {best.events:>8} {rate:>10,.0f} {1e6 / rate:>9.1f}  {verdict}")
    rules = make_rules(1 << 26)
    print(f"\n{'learners':>12} {'ms/version':>10} {'us/event':>9} {'of 16':>6}")
    first = 0.0
    for learners in FLEETS:
        manifests = fleet(rules, learners, 3)
        best = min((play(rules, manifests) for _ in range(3)), key=lambda run: run.seconds)
        each = best.seconds / best.events
        first = first or each
        version = best.seconds / len(manifests)
        print(f"{learners:>12} {1e3 * version:>10.1f} {1e6 * each:>9.1f} {each / first:>6.2f}")
    _print_records()
    if "--profile" in sys.argv:
        manifests = fleet(rules)
        profile = cProfile.Profile()
        profile.runcall(play, rules, manifests)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    run_part({"rounds": rounds_main, "events": events_main})
