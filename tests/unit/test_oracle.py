"""The oracle on tapes of the real aggregator: silent on each, and on none that was changed."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runlab import Lab

from diloco.aggregator.core import machine
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.rounds import step_share
from diloco.aggregator.rollback import find_versions, roll_back
from diloco.aggregator.settings import change_settings
from diloco.common.protocol import wire
from diloco.common.storage.tape import Entry, effective_settings, load_specification, read_tape
from diloco.judge.oracle import RULES, Oracle, Remaker, fragment_walk, numbers
from diloco.judge.oracle.data import Data

WHOLE = {"enabled": False}
# Everything that arithmetic can be, each at least once.
ARITHMETIC = {
    "average": {},
    "rda, int4, nesterov": {
        "sync": {"codec": "int4", "delta_codec": "int4"},
        "outer": {"optimizer": "nesterov", "merge": "rda"},
    },
    "rda, int8, momentum": {
        "sync": {"codec": "int8", "delta_codec": "int4"},
        "outer": {"optimizer": "momentum", "merge": "rda", "participation": True},
    },
    "rda, bfloat16, delayed": {
        "sync": {"codec": "bfloat16", "delta_codec": "bfloat16"},
        "outer": {
            "optimizer": "delayed_nesterov", "merge": "rda", "delay_rounds": 3,
            "delay_fraction": 0.1,
        },
    },
    "centered clipping, int4, nesterov": {
        "sync": {"codec": "int4", "delta_codec": "int4"},
        "run": {"trust": "others"},
        "outer": {"optimizer": "nesterov", "clip_radius": 0.7},
    },
}  # fmt: skip


def play(story, sections=None, fragments=1) -> tuple[Lab, list]:
    """A lab after a story, and its tape."""

    async def run():
        lab = Lab(fragments=fragments, sections=sections, **WHOLE)
        await lab.create()
        await story(lab)
        return lab, [item async for item in read_tape(lab.context)]

    return asyncio.run(asyncio.wait_for(run(), 300))


async def eventful(lab: Lab) -> None:
    """Two learners, a damaged update, a new owner, new settings, a rollback."""
    lab.scattered.add("b")
    async with lab.aggregating():
        for learner in ("a", "b"):
            await lab.join(learner)
        await lab.send_many("a", 4)
        manifest = lab.upload("b")
        lab.damage(manifest.shards[0])
        await lab.announce(manifest)
        await lab.answered(manifest)
        both = [lab.upload("a"), lab.upload("b")]
        for one in both:
            await lab.announce(one)
        for one in both:
            await lab.answered(one)
    async with lab.aggregating():
        await lab.send_many("a", 3)
        settings, _ = await effective_settings(lab.context)
        outer = settings.outer.model_copy(update={"learning_rate": 0.25})
        await change_settings(lab.context, settings.model_copy(update={"outer": outer}))
        await lab.send_many("b", 3)
        await roll_back(lab.context, await find_versions(lab.context, {0: 5}))
        await lab.send_many("a", 3)


async def crowded(lab: Lab) -> None:
    """Four learners in each round, one of them too loud; a new owner in between."""
    lab.loudness["d"] = 6.0
    for learner in "abcd":
        await lab.join(learner)
    for rounds in (3, 2):
        async with lab.aggregating():
            for _ in range(rounds):
                sent = [lab.upload(learner) for learner in "abcd"]
                for manifest in sent:
                    await lab.announce(manifest)
                for manifest in sent:
                    await lab.answered(manifest)


CENTERED = ARITHMETIC["centered clipping, int4, nesterov"]


@pytest.fixture(scope="module")
def crowded_tape():
    return play(crowded, {**CENTERED, "quorum": {"min_learners": 4, "deadline_s": 20.0}})


def test_centered_clipping_is_followed_and_clips(crowded_tape):
    lab, tape = crowded_tape
    oracle = ask(lab, tape)
    assert [finding.sentence for finding in oracle.findings] == []
    made = [item.body for item in tape if getattr(item.body, "inputs", ())]
    assert [len(record.inputs) for record in made] == [4] * 5
    kept = [float(np.frombuffer(record.kept, np.float32)[0]) for record in made]
    # In the first round nobody knows how far is far.
    assert kept[0] == 0.0
    assert min(kept[1:]) > 0.1


async def twice_in_a_round(lab: Lab) -> None:
    """Three learners in each round, one of which sends from two lives, louder from the second."""
    for learner in "abc":
        await lab.join(learner)
    async with lab.aggregating():
        for _ in range(3):
            sent = [lab.upload("a")]
            await lab.announce(sent[0])
            await lab.join("a")
            lab.loudness["a"] = 6.0
            sent += [lab.upload(learner) for learner in "abc"]
            lab.loudness["a"] = 1.0
            for manifest in sent[1:]:
                await lab.announce(manifest)
            for manifest in sent:
                await lab.answered(manifest)


def test_of_a_learner_with_two_updates_in_a_round_the_later_one_sets_the_radius():
    lab, tape = play(twice_in_a_round, {**CENTERED, "quorum": {"min_learners": 3}})
    made = [item.body for item in tape if getattr(item.body, "inputs", ())]
    assert [one.learner for one in made[1].inputs].count("a") == 2
    assert [finding.sentence for finding in ask(lab, tape).findings] == []


@pytest.mark.parametrize(("most", "split"), [(3, True), (1 << 15, False)])
def test_a_round_is_one_record_however_many_learners_it_has(monkeypatch, most, split):
    """Unless it has more observations than a record may have."""
    for module in (machine, fragment_walk):
        monkeypatch.setattr(module, "OBSERVATIONS", 3)
        monkeypatch.setattr(module, "MOST_OBSERVATIONS", most)
    lab, tape = play(crowded, {"quorum": {"min_learners": 4, "deadline_s": 20.0}})
    assert [finding.sentence for finding in ask(lab, tape).findings] == []
    reasons = [getattr(item.body, "reason", "") for item in tape]
    assert ("observations" in reasons) == split


@pytest.mark.parametrize("field", ["kept", "radii"])
def test_what_is_said_wrongly_of_a_center_is_named(crowded_tape, field):
    lab, tape = crowded_tape
    at = [i for i, item in enumerate(tape) if getattr(item.body, "inputs", ())][2]
    wrong = changed(
        tape[at].body, field, lambda now: (np.frombuffer(now, np.float32) * 1.1).tobytes()
    )
    found = ask(lab, [*tape[:at], tape[at]._replace(body=wrong)]).findings
    assert "factors" in {finding.rule for finding in found}
    assert field in {finding.field for finding in found}


def ask(lab: Lab, tape: list) -> Oracle:
    """An oracle that has heard a tape."""
    specification = asyncio.run(load_specification(lab.bus, lab.context.run))
    remaker = Remaker(lab.context.layout, lab.store.get)
    oracle = Oracle(specification, lab.context.layout, remaker=remaker)
    for item in tape:
        oracle.take(item)
    return oracle


@pytest.mark.parametrize("sections", ARITHMETIC.values(), ids=ARITHMETIC)
def test_it_is_silent_on_what_happened(sections):
    lab, tape = play(eventful, sections)
    oracle = ask(lab, tape)
    assert [finding.sentence for finding in oracle.findings] == []
    (chain,) = oracle.chains
    decided = [item for item in tape if getattr(item.body, "what", "") in ("version", "verdict")]
    assert chain.followed == len(decided) - 1
    assert chain.unknown == []


def changed(record: wire.Record, field: str, value) -> wire.Record:
    """A record that says something else; a path of fields leads to what it says."""
    name, _, rest = field.partition(".")
    now = getattr(record, name)
    if not rest:
        return record.model_copy(update={name: value(now)})
    if isinstance(now, tuple):
        return record.model_copy(update={name: (changed(now[0], rest, value), *now[1:])})
    return record.model_copy(update={name: changed(now, rest, value)})


def add(count):
    return lambda now: now + count


# What a wrong record says, and the rule that says so.
WRONG = [
    ("version", add(1), "chain"),
    ("base_seq", add(1), "chain"),
    ("base_digest", lambda _: "0" * 32, "chain"),
    ("global_step", add(1), "clock"),
    ("inputs", lambda _: (), "admission"),
    ("inputs.weight", lambda now: now * 1.01, "weight"),
    ("inputs.staleness", add(1), "weight"),
    ("inputs.discount", lambda now: now * 0.9, "weight"),
    ("inputs.clip", lambda now: now * 0.9, "weight"),
    ("inputs.tokens", add(1), "admission"),
    ("inputs.announced_at_s", add(-1.0), "admission"),
    ("inputs.coefficients", lambda now: bytes([now[0] ^ 8, *now[1:]]), "coefficients"),
    ("factors", lambda now: (np.frombuffer(now, np.float32) * 1.01).tobytes(), "factors"),
    ("reason", lambda _: "deadline", "round"),
    ("final", lambda _: True, "round"),
    ("opened_at_s", add(-1.0), "round"),
    ("closed_at_s", add(1.0), "round"),
    ("learning_rate", lambda now: now * 2, "settings"),
    ("momentum", lambda now: now / 2, "settings"),
    ("view_digest", lambda _: "0" * 32, "arrays"),
    ("outer_digest", lambda _: "0" * 32, "arrays"),
    ("position", add(1), "position"),
    ("totals.tokens_merged", add(1), "totals"),
    ("snapshot_version", add(1), "objects"),
    ("policy.members.norm", add(1.0), "memory"),
    ("policy.members.unused_s", add(1.0), "memory"),
    ("policy.members.speed", add(1.0), "memory"),
    ("policy.members.missed", add(1), "memory"),
    ("policy.members.weight", add(1.0), "memory"),
    ("totals.tokens_credited", add(1), "totals"),
    ("inputs.steps_credited", add(-1), "weight"),
    ("policy.allowances.left", add(1.0), "memory"),
    ("policy.marks.seq", add(1), "memory"),
    ("policy.quarantined", lambda _: ("a",), "memory"),
    ("policy.settings_seq", add(1), "memory"),
]  # fmt: skip


@pytest.fixture(scope="module")
def eventful_tape():
    return play(eventful, ARITHMETIC["rda, int4, nesterov"])


@pytest.mark.parametrize(("field", "value", "rule"), WRONG, ids=[wrong[0] for wrong in WRONG])
def test_it_names_what_a_record_says_wrongly(eventful_tape, field, value, rule):
    lab, tape = eventful_tape
    at = [
        index for index, item in enumerate(tape)
        if isinstance(item.body, wire.Record) and item.body.inputs
    ][3]  # fmt: skip
    wrong = tape[at]._replace(body=changed(tape[at].body, field, value))
    findings = ask(lab, [*tape[:at], wrong]).findings
    assert rule in {finding.rule for finding in findings}
    assert {finding.seq for finding in findings} == {wrong.seq}
    for finding in findings:
        assert RULES[finding.rule] in finding.sentence
        assert finding.about in finding.sentence


def test_a_restore_that_repeats_another_version_is_named(eventful_tape):
    lab, tape = eventful_tape
    at = next(i for i, item in enumerate(tape) if getattr(item.body, "what", "") == "restore")
    wrong = tape[at].body.model_copy(update={"restored_version": 3})
    findings = ask(lab, [*tape[:at], tape[at]._replace(body=wrong)]).findings
    assert {finding.rule for finding in findings} == {"restore"}
    assert {finding.field for finding in findings} >= {"view_digest", "global_step"}


@pytest.mark.parametrize("shift", [-8, 8], ids=["repeats", "leaves out"])
def test_data_that_is_repeated_or_left_out_is_named(eventful_tape, shift):
    lab, tape = eventful_tape
    at = [i for i, item in enumerate(tape) if isinstance(item.body, wire.Manifest)][2]
    body = tape[at].body
    moved = body.model_copy(update={"position": body.position + shift})
    (finding, *_) = ask(lab, [*tape[:at], tape[at]._replace(body=moved)]).findings
    assert finding.rule == "data"


def test_an_end_before_the_last_version_is_named(eventful_tape):
    lab, tape = eventful_tape
    last = tape[-1]
    (newest,) = [item for item in tape if isinstance(item.body, wire.Record)][-1:]
    stop = wire.Stop(run="lab", global_step=0, reason="steps", by="test")
    end = wire.End(run="lab", versions=(newest.body.version,), record_seqs=(newest.seq,))
    more = [
        Entry(last.seq + 1, last.time_s, "diloco.lab.stop", stop, 1),
        Entry(last.seq + 2, last.time_s, "diloco.lab.end", end, 1),
    ]
    assert [finding.rule for finding in ask(lab, [*tape, *more]).findings] == ["stop", "end"]


@pytest.mark.parametrize(
    ("lengths", "behind", "findings"),
    [((0, 80), 0, []), ((0, 80), 8, ["stop"]), ((80,), 0, ["stop"]), ((0,), 8, [])],
)
def test_a_stop_may_have_been_decided_before_a_change_that_came_first(
    eventful_tape, lengths, behind, findings
):
    """A stop cites the clock at which it was due; the run had its old length then."""
    lab, tape = eventful_tape
    last, (newest,) = tape[-1], [i for i in tape if isinstance(i.body, wire.Record)][-1:]
    clock = newest.body.global_step
    document = lab.context.settings.model_dump()
    said: list[wire.Body] = []
    for more in lengths:
        settings = document | {"run": document["run"] | {"steps": clock + more}}
        said.append(wire.Settings(run="lab", settings=settings, changed=(), by="operator"))
    said.append(wire.Stop(run="lab", global_step=clock - behind, reason="steps", by="test"))
    told = [
        Entry(last.seq + at, last.time_s, f"diloco.lab.{body.kind}", body, 1)
        for at, body in enumerate(said, 1)
    ]
    assert [finding.rule for finding in ask(lab, [*tape, *told]).findings] == findings


@pytest.mark.parametrize(("named", "findings"), [(1, []), (2, []), (0, ["end"]), (3, ["end"])])
def test_an_end_names_any_final_record_of_the_last_version(eventful_tape, named, findings):
    lab, tape = eventful_tape
    before, newest = [item for item in tape if isinstance(item.body, wire.Record)][-2:]
    seq = tape[-1].seq
    final = newest.body.model_copy(update={"final": True})
    # What came too late for the last version is answered by a record more.
    verdict = final.model_copy(update={"what": "verdict", "base_seq": newest.seq})
    seqs = (before.seq, newest.seq, seq + 1, seq + 2)
    stop = wire.Stop(run="lab", global_step=0, reason="steps", by="test")
    end = wire.End(run="lab", versions=(final.version,), record_seqs=(seqs[named],))
    more = [
        Entry(seq + 1, newest.time_s, newest.subject, verdict, 1),
        Entry(seq + 2, newest.time_s, "diloco.lab.stop", stop, 1),
        Entry(seq + 3, newest.time_s, "diloco.lab.end", end, 1),
    ]
    at = tape.index(newest)
    told = [*tape[:at], newest._replace(body=final), *tape[at + 1 :], *more]
    assert [one.rule for one in ask(lab, told).findings if one.rule == "end"] == findings


def test_a_quarantine_without_offences_is_named(eventful_tape):
    lab, tape = eventful_tape
    last = tape[-1]
    word = wire.Quarantine(run="lab", learner="a", active=True, reason="", by="aggregator")
    said = Entry(last.seq + 1, last.time_s, "diloco.lab.quarantine.a", word, 1)
    (finding,) = ask(lab, [*tape, said]).findings
    assert finding.rule == "quarantine"
    operator = said._replace(body=word.model_copy(update={"by": "operator"}))
    assert ask(lab, [*tape, operator]).findings == []


def test_a_trimmed_tape_is_judged_from_where_all_is_known(eventful_tape):
    lab, tape = eventful_tape
    at = [i for i, item in enumerate(tape) if isinstance(item.body, wire.Record)][4]
    oracle = ask(lab, [tape[0], *tape[at:]])
    assert oracle.findings == []
    assert oracle.chains[0].followed > 3


@pytest.mark.parametrize("number", [0, 1], ids=["answered and announced again", "not answered"])
def test_a_trimmed_tape_says_which_updates_were_answered_before_it(eventful_tape, number):
    """What was answered and is announced again waits for nothing; a later update does."""
    lab, tape = eventful_tape
    bodies = [item.body for item in tape]
    oldest = next(body for body in bodies if isinstance(body, wire.Record) and body.inputs)
    taken = oldest.inputs[0]
    manifest = next(
        body for body in bodies
        if isinstance(body, wire.Manifest) and (body.learner, body.seq) == (taken.learner, taken.seq)
    ).model_copy(update={"seq": taken.seq + number})  # fmt: skip
    specification = asyncio.run(load_specification(lab.bus, lab.context.run))
    data = Data(specification, {})
    data.missing_before(1000)
    data.begin(oldest)
    assert list(data.take(manifest, 1001)) == []
    past = oldest.model_copy(update={"inputs": (), "position": 1002})
    findings = list(data.resolve(past, 1003, followed=False))
    assert [finding.rule for finding in findings] == ["position"] * number


def test_a_mean_of_more_learners_takes_a_longer_step_where_they_may_lie():
    state: Any = SimpleNamespace(admitted=SimpleNamespace(senders=set("abcdef")))
    taken = [step_share(state, participation=False, centered=centered) for centered in (0, 1)]
    assert taken == [1.0, pytest.approx(1.2**0.5)]
    grown = [numbers.growth(learners) for learners in range(1, 65)]
    assert [formulas.mean_growth(learners) for learners in range(1, 65)] == pytest.approx(grown)
    assert (grown[:5], grown[7:]) == ([1.0] * 5, [pytest.approx(1.6**0.5)] * 57)


def test_every_rule_has_its_line_in_the_runbook():
    runbook = Path("runbooks/broken-invariant.md").read_text()
    for rule, sentence in RULES.items():
        assert f"- `{rule}`: {sentence}" in runbook


def test_what_it_merges_is_compared_with_its_manifest(eventful_tape):
    lab, tape = eventful_tape
    record = next(i.body for i in tape if isinstance(i.body, wire.Record) and i.body.inputs)
    name = record.inputs[0].shards[0].name
    specification = asyncio.run(load_specification(lab.bus, lab.context.run))

    def rotten(wanted: str) -> bytes:
        data = lab.store.get(wanted)
        return data[:-1] + bytes([data[-1] ^ 16]) if wanted == name else data

    remaker = Remaker(lab.context.layout, rotten)
    oracle = Oracle(specification, lab.context.layout, remaker=remaker)
    for item in tape:
        oracle.take(item)
    assert {finding.rule for finding in oracle.findings} == {"input"}


def test_the_table_of_what_the_oracle_recomputes_has_every_rule_and_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    table = page.partition("## What the oracle recomputes")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert {*RULES, *wire.Record.model_fields} - named == set()
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    assert {rule for rules, _ in rows for rule in re.findall(r"`(\w+)`", rules)} == {*RULES}
