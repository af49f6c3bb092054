"""Who looks at a run sees which modules a learner holds, and those that nobody holds."""

from messages import EXAMPLES
from records import make_member, make_record
from runlab import Lab

from diloco.aggregator.core import memory
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Entry
from diloco.run.health_findings import judged
from diloco.run.observed import Observed

MODULES = ("trunk", "plus", "minus")


def seen(*holds: tuple[str, ...], modules: tuple[str, ...] = MODULES) -> Observed:
    """What is known of learners "0", "1", ... that hold these modules and train."""
    known = Observed("lab", 0, Lab().context.settings, modules=modules)
    known.from_start = True
    for seq, held in enumerate(holds, 1):
        name = str(seq - 1)
        join = wire.Join(run="lab", learner=name, layout="0" * 32, host="h", holds=held)
        known.take(Entry(seq, 0.0, names.join("lab", name), join, 99))
        beat = EXAMPLES[wire.Heartbeat].model_dump() | {
            "learner": name, "incarnation": seq, "state": "training", "trouble": "", "now_s": 0.0,
        }  # fmt: skip
        known.hear(wire.Heartbeat(**beat), 1.0)
    # As the machine of each fragment has them.
    for fragment, module in enumerate(MODULES):
        members = tuple(
            make_member(str(number), 1.0).model_copy(
                update={"incarnation": number + 1}
                | ({} if not held or module in held else OTHER | {"not_holding": (number + 1,)})
            )
            for number, held in enumerate(holds)
        )
        policy = memory.beginning().model_copy(update={"members": members})
        record = make_record(fragment=fragment, policy=policy)
        seq = len(holds) + fragment + 1
        known.take(Entry(seq, 0.0, names.record("lab", fragment), record, 99))
    return known


OTHER = {"live": False, "left": True}


def unheld(known: Observed, now_s: float = 2.0) -> list[str]:
    found = judged(known.run(now_s), known.settings)
    return [one.about for one in found if one.about.startswith("module")]


def test_a_learner_that_does_not_hold_a_fragment_has_not_left_the_run() -> None:
    one, other = seen(("trunk", "plus"), ("trunk", "minus")).run(2.0).learners
    assert (one.state, one.left, one.live) == ("training", False, True)
    assert (one.holds, other.holds) == (("trunk", "plus"), ("trunk", "minus"))


def test_the_tokens_of_a_learner_are_averaged_over_what_it_holds() -> None:
    known = seen(("trunk", "plus"), ())
    for history in known.known.values():
        history.tokens = 600
    part, whole = known.run(2.0).learners
    assert (part.tokens, whole.tokens) == (300, 200)


def test_a_module_that_nobody_holds_is_told() -> None:
    assert unheld(seen(("trunk", "plus"), ("trunk",))) == ["module minus"]
    assert unheld(seen(("trunk", "plus"), ("trunk", "minus"))) == []
    assert unheld(seen(("trunk", "plus"), ())) == []


def test_who_is_silent_holds_nothing() -> None:
    """Of a run without a learner another finding tells."""
    known = seen(("trunk", "plus"), ("trunk", "minus"))
    beat = known.known["0"].last.heartbeat
    known.hear(beat, 1000.0)
    assert unheld(known, 1001.0) == ["module minus"]
    assert unheld(known, 5000.0) == []


def test_a_module_of_a_learner_whose_join_was_not_read_may_be_held() -> None:
    known = seen(("trunk", "plus"), ("trunk",))
    known.known["1"].holds = None
    assert unheld(known) == []


def test_a_model_of_one_module_has_none_to_tell_of() -> None:
    assert unheld(seen((), modules=("", "", ""))) == []


def test_a_module_whose_holders_nobody_bounds_is_told_where_learners_may_lie() -> None:
    known = seen(("trunk", "plus"), ("trunk", "minus"), ("trunk", "plus"), ("trunk", "plus"))
    assert unheld(known) == []
    section = known.settings.run.model_copy(update={"trust": "others"})
    known.settings = known.settings.model_copy(update={"run": section})
    (told,) = [one for one in judged(known.run(2.0), known.settings) if "module" in one.about]
    assert (told.about, told.severity) == ("module minus", "note")
    assert told.sentence.startswith("1 of its holders are there")
