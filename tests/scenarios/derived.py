"""The derived collections of a machine's state, recomputed from their items."""

from collections import Counter
from collections.abc import Iterable

from diloco.aggregator.core.state import State, has_unread, unread
from diloco.aggregator.core.updates import update_id

PATIENCE = 3
GREATEST = 1e150


def check_derived(state: State) -> None:
    """Checks that a state's sums agree with its members and updates one by one."""
    _check_members(state)
    _check_updates(state)
    each = [one.manifest.learner for one in (*state.admitted, *_awaited(state))]
    assert dict(state.announced_by) == Counter(each)
    assert has_unread(state) == bool(unread(state))
    for life in state.marks:
        assert life[1] in state.marks.lives(life[0])


def _check_members(state: State) -> None:
    members = state.members
    here = {n: m for n, m in members.items() if m.live and n not in state.quarantined}
    assert set(members.present) == here.keys()
    assert set(members.awaited) == {n for n, m in here.items() if m.missed < PATIENCE}
    assert set(members.unfinished) == {n for n, m in here.items() if not m.final}
    steps_s = sorted(m.step_time_s for m in here.values() if m.step_time_s > 0)
    assert members.usual_step_s() == (steps_s[(len(steps_s) - 1) // 2] if steps_s else 0.0)
    fastest_s = max(steps_s[0], members.usual_step_s() / 2) if steps_s else 0.0
    assert members.fastest_step_s() == fastest_s
    norms = {n: m.norm for n, m in here.items()}
    norms |= {
        one.manifest.learner: one.norm_per_step
        for one in state.admitted
        if one.manifest.learner in here
    }
    rates = {
        n: max(m.speed, min(1 / m.step_time_s, GREATEST) if m.step_time_s else 0)
        for n, m in here.items()
    }
    for name in (*members, "nobody"):
        others = here.keys() - {name}
        assert members.others_norm(name) == _upper_median(norms[n] for n in others)
        assert members.others_rate(name) == _upper_median(rates[n] for n in others)
        heavy = (rates[n] * min(here[n].tokens_per_step, GREATEST) ** 2 for n in others)
        assert members.others_tokens_rate(name) == _upper_median(heavy)


def _check_updates(state: State) -> None:
    pending = state.pending
    waited_for = _awaited(state)
    assert pending.awaited == len(waited_for)
    assert dict(pending.awaited_from) == Counter(one.manifest.learner for one in waited_for)
    times = [one.announced_at_s for one in waited_for]
    assert pending.first_announced_at_s == min(times, default=None)
    assert pending.unfetched() == [key for key, one in pending.items() if not one.fetching]
    assert dict(pending.lives) == Counter(key[:2] for key in pending)
    assert sorted(one.stream_seq for one in pending.unordered()) == sorted(
        one.stream_seq for one in pending.values()
    )
    for resolved in (state.admitted, state.rejected):
        named = [update_id(one.manifest) for one in resolved]
        assert dict(resolved.named) == Counter(named)
        assert dict(resolved.lives) == Counter(one[:2] for one in named)
        assert dict(resolved.senders) == Counter(one.learner for one in named)
    times = [one.announced_at_s for one in state.admitted]
    assert state.admitted.first_announced_at_s == min(times, default=None)


def _awaited(state: State) -> list:
    return [one for one in state.pending.values() if not one.passed]


def _upper_median(values: Iterable[float]) -> float | None:
    known = sorted(value for value in values if value > 0)
    return known[len(known) // 2] if len(known) >= 2 else None
