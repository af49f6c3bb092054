"""docs/logs.md lists every event that the code logs: each has its meaning, and no other has one."""

from collections import Counter

from docs.generate.logs import MEANINGS, events, logged


def test_every_event_has_a_meaning_and_no_other_has_one() -> None:
    assert {event.key for event in events()} == set(MEANINGS)


def test_two_events_of_one_action_have_meanings_of_their_own() -> None:
    shared = Counter(event.key for event in events())
    assert {key for key, count in shared.items() if count > 1} == set()


def test_events_are_found() -> None:
    found = {event.action for event in logged()}
    assert {"committed", "waiting", "stop", "left"} <= found
