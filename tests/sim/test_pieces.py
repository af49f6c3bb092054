"""A long simulation can be interrupted: pieces that have passed are not run again."""

import pytest
from simpieces import PIECE, Results, pieces, sums
from simrun import simulate
from simtrial import FULL, Trial


def test_a_piece_that_has_passed_is_found_again(tmp_path):
    results = Results(tmp_path / "new" / "results.jsonl", "a-commit")
    piece = [Trial(seed=seed, minutes=0.5) for seed in (3, 4)]
    assert results.find(piece) is None
    found = sums([simulate(plan) for plan in piece])
    results.add(piece, found)
    assert results.find(piece) == found
    assert found.seeds == 2
    assert found.fates["merged"] > 0


def test_of_another_commit_or_setting_it_is_another_piece(tmp_path):
    piece = [Trial(seed=3)]
    path = tmp_path / "results.jsonl"
    Results(path, "a-commit").add(piece, sums([]))
    assert Results(path, "a-commit").find(piece) is not None
    assert Results(path, "another").find(piece) is None
    assert Results(path, "a-commit").find([Trial(seed=4)]) is None
    assert Results(path, "a-commit").find([Trial(seed=3, kinds=FULL)]) is None


def test_pieces_leave_no_seed_out():
    plans = [Trial(seed=seed) for seed in range(2 * PIECE + 1)]
    assert [plan for piece in pieces(plans) for plan in piece] == plans


@pytest.mark.parametrize("line", ["{", "[]", '{"of": {}}', '{"of": {}, "sums": {"seeds": 1}}'])
def test_a_line_that_is_no_piece_is_named(tmp_path, line):
    piece, path = [Trial(seed=3)], tmp_path / "results.jsonl"
    results = Results(path, "a-commit")
    results.add(piece, sums([]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*results.jsonl is no piece"):
        results.find(piece)


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"seed": -1}, "the seed is -1, 0 or more was expected"),
        ({"minutes": 0}, "minutes is 0, more than 0 was expected"),
        ({"learners": 16}, "learners is 16, 1 to 15 was expected"),
        ({"fragments": 0}, "fragments is 0"),
        ({"intensity": 0}, "intensity is 0"),
        ({"kinds": ("crash", "earthquake")}, "there is no kind earthquake"),
    ],
)
def test_a_world_that_cannot_be_is_named(world, said):
    with pytest.raises(ValueError, match=said):
        Trial(**{"seed": 1, **world})
