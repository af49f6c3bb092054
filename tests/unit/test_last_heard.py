"""Liveness by incarnation: whose silence counts, and whose heartbeats do not."""

from diloco.aggregator.core.members import LastHeard, Member

TIMEOUT_S = 10.0


def heard(last_heard, beats, member, *, until_s, learner="a"):
    """Whether `learner` is live at the end; everybody of `beats` (name, life) beats each second."""
    for now_s in range(1, until_s + 1):
        for name, incarnation in beats:
            last_heard.beat(name, incarnation, float(now_s), TIMEOUT_S)
        live = last_heard.is_live(0, learner, member, float(now_s), TIMEOUT_S)
    return live


def test_a_learner_that_beats_is_live_and_one_that_is_silent_is_not():
    beating, silent = Member(7), Member(8)
    assert heard(LastHeard(0.0), [("a", 7)], beating, until_s=60)
    assert heard(LastHeard(0.0), [("a", 7)], silent, until_s=9, learner="b")
    assert not heard(LastHeard(0.0), [("a", 7)], silent, until_s=60, learner="b")


def test_a_superseded_life_that_goes_on_beating_is_not_live():
    """A second process took the name and died; the first knows nothing of it."""
    newer = Member(20)
    assert heard(LastHeard(0.0), [("a", 20), ("b", 5)], newer, until_s=60)
    assert not heard(LastHeard(0.0), [("a", 7), ("b", 5)], newer, until_s=60)


def test_two_processes_with_one_name_do_not_hide_each_other():
    assert heard(LastHeard(0.0), [("a", 20), ("a", 7)], Member(20), until_s=60)
    assert heard(LastHeard(0.0), [("a", 7), ("a", 20)], Member(20), until_s=60)


def test_a_newer_life_that_beats_breaks_the_silence_of_the_life_before_it():
    """That one may hold shares of the data until the newer one begins to claim."""
    last_heard = LastHeard(0.0)
    heard(last_heard, [("a", 20)], Member(20), until_s=60)
    assert last_heard.silent_s("a", 7) == 0.0
    assert last_heard.silent_s("a", 21) == 60.0


def test_lives_that_were_never_joined_hide_only_themselves_and_take_no_memory():
    last_heard = LastHeard(0.0)
    for number in range(1000):
        last_heard.beat("a", 10**9 + number, 1.0, TIMEOUT_S)
    assert len(last_heard._heard_at_s["a"]) <= 4
    assert heard(last_heard, [("b", 5)], Member(5), until_s=60, learner="b")


def test_when_nobody_is_heard_it_is_the_bus_that_is_silent():
    last_heard, member = LastHeard(0.0), Member(7)
    assert heard(last_heard, [("a", 7)], member, until_s=5)
    # For an hour nothing comes; then one learner is heard again, and the other has time as well.
    assert last_heard.is_live(0, "a", member, 3600.0, TIMEOUT_S)
    last_heard.beat("b", 8, 3600.0, TIMEOUT_S)
    assert last_heard.is_live(0, "a", member, 3601.0, TIMEOUT_S)
    assert last_heard.silent_s("a", 7) == 0.0
    last_heard.beat("b", 8, 3609.0, TIMEOUT_S)
    assert last_heard.silent_s("a", 7) == 9.0
    last_heard.beat("b", 8, 3611.0, TIMEOUT_S)
    assert not last_heard.is_live(0, "a", member, 3611.0, TIMEOUT_S)


def test_a_join_and_an_update_are_signs_of_life_in_all_fragments():
    last_heard = LastHeard(0.0)
    first, later = Member(7, heard_at_s=1.0), Member(7, heard_at_s=99.0)
    assert not heard(last_heard, [("b", 5)], first, until_s=30)
    assert last_heard.is_live(1, "a", later, 30.0, TIMEOUT_S)
    assert last_heard.is_live(0, "a", first, 31.0, TIMEOUT_S)
