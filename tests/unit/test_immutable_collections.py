"""Collections that are replaced, beside the ones that are changed."""

from collections import Counter
from statistics import median_high, median_low

from hypothesis import given
from hypothesis import strategies as st

from diloco.aggregator.core.immutable_collections import PersistentMap, Ranked, Tally

KEYS = st.sampled_from("abcdef")
NUMBERS = st.floats(allow_nan=False)


@given(st.lists(st.tuples(KEYS, st.none() | st.integers())))
def test_kept_is_a_dictionary_that_is_replaced(changes):
    plain, kept = {"z": 0}, PersistentMap({"z": 0})
    for key, value in changes:
        before, same = kept, dict(plain)
        if value is not None:
            plain[key], kept = value, kept.put(key, value)
        elif key in plain:
            del plain[key]
            kept = kept.drop(key)
        assert list(before.items()) == list(same.items()), "what was before is as it was"
        assert list(kept.items()) == list(plain.items()), "in the same order"
        assert len(kept) == len(plain)
        assert sorted(kept.unordered()) == sorted(plain.values())
        assert [kept.find(each) for each in "abz"] == [plain.get(each) for each in "abz"]
        assert [each in kept for each in "abz"] == [each in plain for each in "abz"]


@given(st.lists(NUMBERS), st.lists(st.tuples(st.integers(0), st.none() | NUMBERS)))
def test_ranked_numbers_are_those_of_a_sorted_list(begin, changes):
    plain, ranked = sorted(begin), Ranked(begin)
    for index, new in changes:
        old = plain.pop(index % len(plain)) if plain and index % 3 else None
        plain = sorted([*plain, *([] if new is None else [new])])
        ranked = ranked.swap(old, new)
        assert len(ranked) == len(plain)
        assert ranked.lower_median() == (median_low(plain) if plain else None)
        assert ranked.least() == (plain[0] if plain else None)
        assert ranked.upper_median(None, 2) == (median_high(plain) if len(plain) > 1 else None)
        for own in plain:
            others = list(plain)
            others.remove(own)
            wanted = median_high(others) if len(others) > 1 else None
            assert ranked.upper_median(own, 2) == wanted


@given(st.lists(KEYS), st.lists(st.tuples(KEYS, st.integers(-2, 2))))
def test_a_tally_counts(begin, changes):
    plain, tally = Counter(begin), Tally(begin)
    for key, wanted in changes:
        by = max(wanted, -plain[key])
        if not by:
            continue
        plain[key] += by
        tally = tally.more(key, by)
        assert dict(tally) == {key: count for key, count in plain.items() if count}
        assert tally.of(key) == plain[key]
        assert len(tally) == len(dict(tally))
