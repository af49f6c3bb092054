"""Runs that are measured by loss and skills, and their tables; older lines stay readable."""

import dataclasses
import json

import numpy as np
import pytest

from bench import curves, sweep
from bench.sweep import SweepCase
from diloco.models.bytes_lm import skills


def line(name, seed, loss, exact, **fields):
    case = SweepCase(group="skills", name=name, budget=1080, seed=seed, task="skills")
    scored = {
        "figures": {"loss": loss, "exact": exact},
        "slices": {skill: {"loss": 1.0, "exact": exact} for skill in skills.SKILLS},
    }
    after = {**scored, "figures": {"loss": loss + 1, "exact": exact / 2}}
    measured = {"loss": loss, "before": scored, "after": after}
    return {"key": case.key, **dataclasses.asdict(case), **measured, **fields}


def tables(path, lines, capsys):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    results = curves.read(path, "skills")
    for when in ("before", "after"):
        curves.skills_table(results, when)
    return [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in capsys.readouterr().out.splitlines()
        if row.startswith("|")
    ]


def test_a_table_pairs_runs_by_seed(tmp_path, capsys):
    """The seeds are far apart, the two systems of a seed are not."""
    lines = [
        line(name, seed, 2.0 + seed + worse, 0.5 - 0.1 * seed - worse)
        for seed in range(3)
        for name, worse in (("data-parallel", 0.0), ("kills, tau = 2", 0.02))
    ]
    rows = tables(tmp_path / "q.jsonl", lines, capsys)
    titles, _, base, system = rows[:4]
    assert titles[4:-2] == list(skills.SKILLS)
    assert (base[:4], base[-2:]) == (
        ["data-parallel", "3", "3.0000 ± 0.5774", ""],
        ["40.0 ± 5.8", ""],
    )
    assert system[2] == "3.0200 ± 0.5774"
    over = 100 * 0.02 / (2.0 + np.arange(3))
    assert system[3] == f"{over.mean():+.2f} ± {over.std(ddof=1) / 3**0.5:.2f}"
    assert system[-2:] == ["38.0 ± 5.8", "-2.0 ± 0.0"]
    assert rows[4][0] == "after fine-tuning"
    assert rows[6][2] == "4.0000 ± 0.5774"
    assert rows[7][-1] == "-1.0 ± 0.0"


def test_seeds_that_only_one_has_are_not_compared(tmp_path, capsys):
    lines = [line("data-parallel", 0, 2.0, 0.5), line("kills, tau = 2", 1, 2.5, 0.4)]
    rows = tables(tmp_path / "q.jsonl", lines, capsys)
    assert (rows[3][3], rows[3][-1]) == ("", "")
    assert rows[3][2] == "2.5000"


def test_each_optimizer_has_its_own_baseline(tmp_path, capsys):
    names = ("data-parallel", "adamw, data-parallel", "adamw, H = 24, kills")
    lines = [line(name, 0, 2.0 + index, 0.5) for index, name in enumerate(names)]
    rows = tables(tmp_path / "q.jsonl", lines, capsys)
    assert rows[4][3] == "+33.33"


def test_cases_go_seed_by_seed_so_that_more_seeds_are_more_lines():
    cases = sweep.matrix("skills")
    assert len({case.key for case in cases}) == len(cases) == 5 * 8
    assert [case.seed for case in cases] == sorted(case.seed for case in cases)
    assert {case.fleet for case in cases} == {"equal", "kills"}


def test_lines_of_before_there_were_skills_are_read(tmp_path, capsys):
    case = SweepCase(group="main", name="uniform", budget=360, seed=0)
    old = {"key": case.key, **dataclasses.asdict(case), "loss": 2.0, "inputs": 4.0}
    (tmp_path / "q.jsonl").write_text(json.dumps(old) + "\n")
    assert case.key in sweep.known(tmp_path / "q.jsonl")
    curves.main_table(curves.read(tmp_path / "q.jsonl", "language"))
    assert "| 360 | uniform | 1 | 2.0000 |" in capsys.readouterr().out
    assert curves.read(tmp_path / "q.jsonl", "skills").names("skills") == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["data-parallel", "kills, tau = 2"])
def test_a_run_is_measured_before_and_after_its_fine_tuning(name, monkeypatch):
    monkeypatch.setattr(sweep, "TUNING_STEPS", 4)
    (case,) = [one for one in sweep.skills(12, 0) if one.name == name]
    found = sweep.run(dataclasses.replace(case, task="skills"))
    assert found["before"]["figures"]["loss"] == pytest.approx(found["loss"])
    assert set(found["before"]["slices"]) == set(found["after"]["slices"]) == set(skills.SKILLS)
    assert found["after"]["figures"] != found["before"]["figures"]
    json.dumps(found)
