"""Events per second of the aggregator's core alone: `python -m bench.events`.

Sixteen learners in step; each round is 16 manifests, 16 verified payloads and a commit. No IO, no
arrays, no decoding: what is left is the machine itself. A second table has larger fleets: a
version's cost should grow as they do, and no faster. A third has the bytes of such fleets' records,
and the time to write and to read one: of a version that is of one update, and of one that is of
everybody's.
"""

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from diloco.aggregator.core import events, machine, memory, policy
from diloco.aggregator.core.effects import Fetch
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import UpdateId
from diloco.common import names, shards, slices, wire
from diloco.common.config import make_config
from diloco.common.layout import Tensor, make_layout
from tests.records import make_input, make_record

LEARNERS = 16
FRAGMENTS = 24
BLOCK = 64
ROUNDS = 400
REPEATS = 5
FLOOR_EVENTS_PER_S = 10_000
FLEETS = (16, 128, 1000, 4000)


class Measured(NamedTuple):
    """One run of the machine: how many events it took, and the CPU seconds they needed."""

    events: int
    seconds: float


def make_rules(shard_elements: int) -> policy.FragmentRules:
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
    return policy.fragment_rules(settings, layout, 0)


def manifest(rules: policy.FragmentRules, learner: int, seq: int, base: int) -> wire.Manifest:
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


def play(rules: policy.FragmentRules, manifests: list[list[wire.Manifest]]) -> Measured:
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
    rules: policy.FragmentRules, learners: int = LEARNERS, rounds: int = ROUNDS
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
        make_input(learner=f"learner-{i}", shards=(shard,), coefficients=bytes(32))
        for i in range(merged)
    )
    return make_record(policy=policy, inputs=inputs)


def _print_records() -> None:
    columns = ("learners", "updates", "record kB", "encode ms", "decode ms")
    print("\n" + " ".join(f"{name:>12}" for name in columns))
    for learners in FLEETS:
        for merged in (1, learners):
            made = record(learners, merged)
            encoded = wire.encode(made)
            encode_s = _processor_s(partial(wire.encode, made))
            decode_s = _processor_s(partial(wire.decode, wire.Record, encoded))
            print(
                f"{learners:>12} {merged:>12} {len(encoded) / 1e3:>12.1f} {1e3 * encode_s:>12.1f} "
                f"{1e3 * decode_s:>12.1f}"
            )


def _processor_s(work: Callable[[], object]) -> float:
    """Of the fastest of five."""
    taken = []
    for _ in range(5):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return min(taken)


def main() -> None:
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
    main()
