"""Who looks at a run sees how many of its slices a learner trains with, by its joins."""

import asyncio
import io

import msgpack
import pytest
from messages import EXAMPLES
from rich.console import Console
from runlab import RUN, Lab

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.storage.tape import Entry
from diloco.learner.hosts.messages import host_gone
from diloco.run.comparison import LAGGING_LEARNER
from diloco.run.health_findings import FEWER_SLICES, judged
from diloco.run.observed import Observed
from diloco.run.state import Finding, RunStatus, SlicesStatus
from diloco.run.watch import Watch
from diloco.show.status import screen

JOIN = wire.Join(run="lab", learner="a", layout="0" * 32, host="h")


def read(**slices: object) -> wire.Join:
    fields = JOIN.model_dump() | {"slices": slices, "schema": wire.SCHEMA, "kind": "join"}
    return wire.decode(wire.Join, msgpack.packb(fields))


def test_a_join_says_the_slices_of_its_life() -> None:
    assert read(present=3, given=4, least=2).slices == wire.LearnerSlices(
        present=3, given=4, least=2
    )
    fields = JOIN.model_dump() | {"schema": wire.SCHEMA, "kind": "join"}
    del fields["slices"]  # As a release without slices writes it.
    assert wire.decode(wire.Join, msgpack.packb(fields)).slices is None


@pytest.mark.parametrize(
    ("present", "given", "least", "sentence"),
    [
        (5, 4, 1, "5 of 4 slices cannot train where 1 are the fewest"),
        (2, 4, 3, "2 of 4 slices cannot train where 3 are the fewest"),
        (0, 4, 1, "field 'slices.present': Input should be greater than or equal to 1"),
        (1, 4, 0, "field 'slices.least': Input should be greater than or equal to 1"),
        (65, 65, 1, "field 'slices.present': Input should be less than or equal to 64"),
        (3, 1 << 62, 1, "field 'slices.given': Input should be less than or equal to 64"),
        (3.0, 4, 1, "field 'slices.present': Input should be a valid integer"),
        (True, 4, 1, "field 'slices.present': Input should be a valid integer"),
    ],
)
def test_slices_that_no_learner_has_are_refused(
    present: object, given: object, least: object, sentence: str
) -> None:
    with pytest.raises(WireError) as caught:
        read(present=present, given=given, least=least)
    assert sentence in str(caught.value)


def test_more_about_slices_than_the_protocol_has_is_refused() -> None:
    with pytest.raises(WireError, match=r"slices\.lost"):
        read(present=3, given=4, least=1, lost=1)


def seen(*joins: tuple[float, tuple[int, int, int] | None], left: bool = False) -> Observed:
    """What is known after joins at these times, with (present, given, least) slices each."""
    known = Observed("lab", 0, Lab().context.settings)
    known.from_start = True
    for seq, (at_s, slices) in enumerate(joins, 1):
        some = slices and wire.LearnerSlices(present=slices[0], given=slices[1], least=slices[2])
        body = JOIN.model_copy(update={"slices": some})
        known.take(Entry(seq, at_s, names.join("lab", "a"), body, 99))
    if left:
        leave = wire.Leave(run="lab", learner="a", incarnation=len(joins), position=0, fragments=())
        seq = len(joins) + 1
        known.take(Entry(seq, joins[-1][0], names.leave("lab", "a"), leave, 99))
    return known


def beating(known: Observed, now_s: float, **said: str) -> Observed:
    """The same, after a heartbeat of the newest life."""
    fields = EXAMPLES[wire.Heartbeat].model_dump() | {
        "learner": "a", "incarnation": known.known["a"].joined, "state": "training", "trouble": "",
        "now_s": 0.0,
    } | said  # fmt: skip
    known.hear(wire.Heartbeat(**fields), now_s)
    return known


def told(known: Observed, now_s: float) -> list[Finding]:
    found = judged(known.run(now_s), known.settings)
    return [one for one in found if one.about == "learner a"]


def of(known: Observed, now_s: float) -> SlicesStatus | None:
    (one,) = known.run(now_s).learners
    return one.slices


def test_a_learner_that_is_one_slice_has_no_slices() -> None:
    known = beating(seen((0.0, None)), 5.0)
    (one,) = known.run(6.0).learners
    assert (one.slices, one.slices_said) == (None, "-")
    assert "slices" not in picture_of(known, 6.0)


def test_fewer_slices_than_given_for_long_are_a_warning_since_the_first_was_lost() -> None:
    known = seen((0.0, (4, 4, 2)), (1000.0, (3, 4, 2)), (1300.0, (2, 4, 2)))
    assert of(beating(known, 1599.0), 1600.0) == SlicesStatus(
        present=2, given=4, least=2, fewer_s=600.0
    )
    assert [one.severity for one in told(known, 1600.0)] == ["ok"]
    (found,) = told(beating(known, 1719.0), 1720.0)
    assert (found.severity, found.runbook) == ("warning", FEWER_SLICES)
    assert found.sentence == "trains with 2 of 4 slices, for 12 min"
    assert "2 of 4" in picture_of(known, 1720.0)


def test_a_learner_that_has_its_slices_again_is_well() -> None:
    known = seen((0.0, (3, 4, 1)), (1000.0, (4, 4, 1)), (5000.0, (3, 4, 1)))
    found = of(beating(known, 5100.0), 5100.0)
    assert found is not None
    assert found.fewer_s == 100.0
    assert [one.severity for one in told(known, 5100.0)] == ["ok"]


def test_a_silent_learner_of_slices_is_told_with_how_many_it_trains() -> None:
    known = beating(seen((0.0, (4, 4, 3))), 10.0)
    (found,) = told(known, 500.0)
    assert (found.severity, found.runbook) == ("warning", FEWER_SLICES)
    assert found.sentence == (
        "silent for 490 s, and has not left the run; it has 4 slices, and trains with 3 or more"
    )
    assert "0 of 4" in picture_of(known, 500.0)


def test_a_host_that_is_lost_is_no_error_while_the_slices_begin_a_new_life() -> None:
    lost = {"state": "failed", "trouble": host_gone("host 1").message}
    known = beating(seen((0.0, (2, 2, 1))), 10.0, **lost)
    (found,) = told(known, 11.0)
    assert (found.severity, found.runbook) == ("note", FEWER_SLICES)
    assert found.sentence == f"a life ended, and its slices begin another: {lost['trouble']}"
    assert not [one for one in judged(known.run(11.0), known.settings) if one.severity == "error"]
    # None has begun another.
    assert "error" in {one.severity for one in judged(known.run(500.0), known.settings)}

    # Of one slice the same is an error, of which somebody has to know.
    (found,) = told(beating(seen((0.0, None)), 10.0, **lost), 11.0)
    assert (found.severity, found.runbook) == ("warning", LAGGING_LEARNER)


def test_lives_that_ended_with_a_host_are_no_errors_of_a_learner_of_slices() -> None:
    known = seen((0.0, (2, 2, 1)), (10.0, (2, 2, 1)))
    known.known["a"].errors.append(host_gone("host 1").message)
    assert [one.severity for one in told(beating(known, 11.0), 12.0)] == ["ok"]
    known.known["a"].errors.append("the loss is NaN")
    (found,) = told(beating(known, 11.0), 12.0)
    assert "errors have ended 1 of its 2 lives" in found.sentence


def test_a_learner_that_left_long_ago_may_lack_slices() -> None:
    known = seen((10.0, (3, 4, 3)), left=True)
    assert [one.severity for one in told(known, 600.0) if one.runbook] == []
    (found,) = told(known, 1300.0)
    assert (found.severity, found.runbook) == ("warning", FEWER_SLICES)
    assert found.sentence == "has left, 22 min ago; it has 4 slices, and trains with 3 or more"
    assert found.advice.startswith("if it was not to end, ")
    # One that trains with any slice has none left: it was to end.
    assert [one.runbook for one in told(seen((10.0, (3, 4, 1)), left=True), 1300.0)] == [None]


def test_slices_that_are_lost_are_no_crash_loop_and_other_ends_are() -> None:
    lost = [(float(at_s), (8 - at_s, 8, 1)) for at_s in range(5)]
    (one,) = seen(*lost).run(5.0).learners
    assert (one.lives, one.sudden_ends) == (5, 0)
    (one,) = seen(*((float(at_s), (8, 8, 1)) for at_s in range(5))).run(5.0).learners
    assert one.sudden_ends == 4


def test_an_aggregators_join_says_nothing_of_slices() -> None:
    known = seen((10.0, (3, 4, 1)))
    body = JOIN.model_copy(update={"platform": wire.NOT_A_LEARNER})
    known.take(Entry(9, 50.0, names.join("lab", "a"), body, 99))
    found = of(known, 60.0)
    assert found is not None
    assert (found.given, found.fewer_s) == (4, 50.0)


def test_who_begins_in_the_middle_of_the_tape_reads_the_joins_before() -> None:
    async def work() -> tuple[int, RunStatus]:
        lab = Lab()
        await lab.create()
        slices = wire.LearnerSlices(present=3, given=4, least=1)
        body = JOIN.model_copy(update={"run": RUN, "slices": slices})
        seq = await lab.bus.publish(names.join(RUN, "a"), wire.encode(body))
        lab.lives["a"] = seq
        async with lab.aggregating():
            await lab.send("a")
        return seq, await Watch(lab.context).begin(seq + 1)

    seq, run = asyncio.run(work())
    (one,) = run.learners
    assert (one.slices_said, one.host, one.incarnation) == ("0 of 4", "h", seq)


def picture_of(known: Observed, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(screen.picture(known.run(now_s)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
