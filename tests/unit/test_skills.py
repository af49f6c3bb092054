"""Exercises and probes: pure, apart, right, and measured by what a model writes itself."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.learner.task import scores
from diloco.models.bytes_lm import skills
from diloco.models.bytes_lm.model import build

DRAWN = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    for number in range(4):
        (path / f"{number}.txt").write_text("the cat sat on the mat. " * 50)
    return str(path)


def task(folder, **options):
    given = {"corpus": folder, "batch": 8, "length": 64, "eval_batches": 1}
    return build(steps=10, seed=5, **(given | options))


def drawn(skill, *, probe, seed=0):
    rng = np.random.default_rng(seed)
    return [skills.draw(skill, rng, probe=probe) for _ in range(DRAWN)]


def is_right(skill, prompt, answer):
    """By other code than what draws."""
    body = prompt[2:].rstrip(">")
    if skill == "copying":
        return answer == body
    if skill == "brackets":
        depths = np.cumsum([1 if c == "(" else -1 for c in body])
        return int(answer) == depths[-1] and depths.min() >= 0
    if skill == "addition":
        return int(answer) == sum(map(int, body.split("+")))
    if skill == "retrieval":
        table, key = body.split(">")
        return answer == dict(re.findall("([a-z])([0-9])", table))[key]
    # Each letter follows the letter that it followed before.
    text, start = body + answer, len(body)
    return all(text[i] == text[text.index(text[i - 1]) + 1] for i in range(start, len(text)))


@pytest.mark.parametrize("skill", skills.SKILLS)
@pytest.mark.parametrize("probe", [True, False])
def test_answers_are_right_and_fit(skill, probe):
    for exercise in drawn(skill, probe=probe):
        assert is_right(skill, exercise.prompt, exercise.answer), exercise
        assert len(exercise.prompt) + len(exercise.wanted) <= skills.LONGEST
        assert len(exercise.wanted) <= skills.LONGEST_ANSWER
        assert exercise.line.startswith(exercise.prompt.encode() + exercise.wanted.rstrip())
        assert exercise.line.endswith(b"\n")


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_no_probe_is_trained_on(skill):
    """By the content, the prompt and the bytes of rows; both sides have exercises of all sizes."""
    probed = skills.probes(skill)
    assert len({one.prompt for one in probed}) == len(probed) == skills.PROBES
    trained = [one for seed in range(5) for one in drawn(skill, probe=False, seed=seed)]
    assert not {one.content for one in probed} & {one.content for one in trained}
    assert not {one.prompt for one in probed} & {one.prompt for one in trained}
    sizes = [np.mean([len(one.prompt) for one in side]) for side in (probed, trained)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.25)
    rows = b"".join(bytes(skills.row(np.random.default_rng(s), 64).tolist()) for s in range(2000))
    for one in probed:
        assert b"\n" + one.prompt.encode() + one.wanted not in rows


def test_exercises_of_training_are_by_a_hash_that_no_process_changes():
    exercise = drawn("addition", probe=True)[0]
    assert zlib.crc32(exercise.content.encode()) % skills.PROBES_ONE_IN == 0
    assert skills.probes("addition")[0] == skills.probes.__wrapped__("addition")[0]


def test_rows_are_a_function_of_seed_learner_position_and_row(folder):
    made = task(folder, skills=0.5)
    first = [next(made.batches("a", position)) for position in range(6)]
    again = made.batches("a", 0)
    for windows in first:
        np.testing.assert_array_equal(windows, next(again))
    np.testing.assert_array_equal(next(made.rows("a", 3, 2, 7)), first[3][2:7])
    assert not np.array_equal(next(made.batches("b", 0)), first[0])
    # Rows of text are those that they were without exercises.
    plain = [next(task(folder).batches("a", position)) for position in range(6)]
    same = np.array([(a == b).all(1) for a, b in zip(first, plain, strict=True)])
    assert 0.3 < same.mean() < 0.7
    exercised = np.concatenate(first)[~same.reshape(-1)]
    assert {chr(row[0]) for row in exercised} == set("ICBAR")
    assert (exercised[:, 1] == ord(":")).all()


def test_an_exercise_needs_room(folder):
    with pytest.raises(TaskError, match="an exercise has 24 bytes"):
        task(folder, skills=0.5, length=16)
    task(folder, length=16)


def measured(write):
    """Skills of a model that writes what `write` says: (bytes so far) -> the next one."""

    def apply(params, tokens_PxW):
        def answers(tokens):
            logits = np.zeros((*tokens.shape, 256), np.float32)
            for p, row in enumerate(np.asarray(tokens)):
                for w in range(len(row)):
                    logits[p, w, write(bytes(row[: w + 1].tolist()))] = 9.0
            return logits

        shape = jax.ShapeDtypeStruct((*tokens_PxW.shape, 256), jnp.float32)
        return jax.pure_callback(answers, shape, tokens_PxW)

    return skills.make_measure(apply)({})


def test_who_writes_the_answers_passes_and_sees_only_the_prompt():
    known = {}
    for skill in skills.SKILLS:
        for one in skills.probes(skill):
            if skill != "copying":
                text = one.prompt.encode() + one.wanted
                known |= {text[:end]: text[end] for end in range(len(one.prompt), len(text))}
    found = measured(lambda seen: known.get(seen, ord("?")))
    assert {skill: figures["exact"] for skill, figures in found.items()} == {
        skill: float(skill != "copying") for skill in skills.SKILLS
    }
    assert found["copying"]["loss"] > 8 > 0.1 > found["induction"]["loss"]


def test_one_wrong_byte_is_no_answer():
    """Each first byte is right, and what follows: but for the second byte of a sum."""
    known = {}
    for one in skills.probes("addition"):
        text = one.prompt.encode() + one.wanted
        known |= {text[:end]: text[end] for end in range(len(one.prompt), len(text))}
        known[text[: len(one.prompt) + 1]] = ord("x")
    found = measured(lambda seen: known.get(seen, ord("?")))
    assert found["addition"]["exact"] == 0.0
    assert 0 < found["addition"]["loss"] < 8


def test_a_task_gives_skills_as_metrics_and_slices(folder):
    made = task(folder, skills=0.5, preset="1m")
    params = jax.jit(made.init)(jax.random.key(0))
    figures, slices = scores(made.evaluate(params))
    plain = task(folder, preset="1m").evaluate(params)
    assert isinstance(plain, float)
    assert figures == {"loss": plain, "exact": pytest.approx(0.0, abs=0.05)}
    assert set(slices) == set(skills.SKILLS)
    assert all(3 < part["loss"] < 8 for part in slices.values())
