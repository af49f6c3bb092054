"""The kept list of planted bugs fits the code; `make mutants` says what finds them."""

import sys
from dataclasses import replace

import pytest

sys.path.insert(0, "tests/mutants")

from mutants import ROOT, DriftError, load, plant

LEAST = 60


def test_every_bug_can_be_planted():
    found = load()
    assert len(found) >= LEAST
    for mutant in found:
        assert mutant.source(ROOT) != (ROOT / mutant.file).read_text()
        assert mutant.breaks


def test_a_bug_that_does_not_fit_any_more_is_named():
    old = replace(load()[0], old="what nobody ever wrote")
    with pytest.raises(DriftError, match=old.name):
        old.source(ROOT)


def test_a_copy_has_the_bug_and_the_tree_has_not(tmp_path):
    mutant = load()[0]
    plant(mutant, tmp_path)
    assert (tmp_path / mutant.file).read_text() == mutant.source(ROOT)
    assert (tmp_path / "diloco" / mutant.file).read_text() == mutant.source(ROOT)
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
