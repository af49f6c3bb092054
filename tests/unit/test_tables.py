"""A run's past in Python: tables and arrays are what the commands say, and the notebook runs."""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import spoiled

import diloco
from diloco.common.protocol.errors import ConfigError

pytest.importorskip("pyarrow", reason="locks/arrow.lock is not installed")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "who_spoiled_a_run.ipynb"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return spoiled.bundled(tmp_path_factory.mktemp("tables"), "rate", versions=7)


@pytest.fixture
def past(bundle):
    with diloco.open(bundle) as past:
        yield past


def test_tables_say_what_the_tape_says(past):
    updates, rounds, versions = past.updates(), past.rounds(), past.versions()
    assert past.name == "spoiled-rate"
    assert updates.num_rows == 7 * 2 * 4
    assert set(updates["answer"].to_pylist()) == {"merged"}
    assert {row["learner"] for row in updates.to_pylist() if row["clip"] < 1} == {spoiled.CULPRIT}
    assert versions.num_rows == 8 * 2
    assert rounds["record_seq"].to_pylist() == sorted(rounds["record_seq"].to_pylist())
    merged = {(row["fragment"], row["version"]): row["learners"] for row in rounds.to_pylist()}
    row = updates.to_pylist()[0]
    assert row["learner"] in merged[row["fragment"], row["version"]]
    assert past.scores().num_rows == 0
    learners = past.now().learners
    assert sum(one.merged for one in learners) == updates.num_rows
    assert [one.name for one in learners if one.less] == [spoiled.CULPRIT]


def test_a_step_has_the_arrays_before_and_after(past):
    step = past.step("0@6")
    assert step.record.version == 6
    assert step.before.keys() == step.after.keys() == step.updates[0].gradient.keys()
    assert [update.said for update in step.updates] == [*step.record.inputs]
    before = past.step("0@5").after
    again = step.again()
    for name, values in step.before.items():
        assert np.array_equal(values, before[name])
        assert np.array_equal(again[name], step.after[name])
        assert not np.array_equal(values, step.after[name])
    for wrong in ("0@0", "1@99", "5"):
        with pytest.raises(ConfigError):
            past.step(wrong)


def test_it_can_be_used_where_an_event_loop_runs(bundle):
    async def in_a_notebook():
        with diloco.open(bundle) as past:
            return past.versions().num_rows

    assert asyncio.run(in_a_notebook()) == 16


def test_a_script_that_closes_nothing_ends_quietly(bundle):
    code = f"import diloco; past = diloco.open({str(bundle)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_the_notebook_finds_the_culprit(bundle, monkeypatch):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    monkeypatch.setattr(sys, "argv", ["notebook", str(bundle)])
    names: dict = {}

    async def as_a_kernel_does():
        exec(compile(code, str(NOTEBOOK), "exec"), names)

    asyncio.run(as_a_kernel_does())
    with contextlib.suppress(AttributeError):
        names["run"].close()  # Again is harmless.
    assert names["suspect"] == spoiled.CULPRIT
    assert names["rise"] > 0
    assert names["worst"]["version"] >= spoiled.SPOILED_FROM["rate"]
    assert set(names["cosines"]) == set(spoiled.LEARNERS)
