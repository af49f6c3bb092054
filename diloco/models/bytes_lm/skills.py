"""Skills of a language model: exercises with exact answers, as bytes, and probes of them.

A training row has exercises of one skill, one in each line; a probe is the prompt of one exercise,
and the model passes if the bytes that it writes itself, each the most probable one, are the answer.
In these lines "|", which is not written, stands between prompt and answer:

    I:kqtzbmkq|tzb          induction: a word of six letters goes on as it did before
    C:hbqo>|hbqo            copying
    B:(()((>|3              bracket depth
    A:41+7>|48              addition to a number of two digits
    R:k7b3q9>b|3            retrieval by key

Rules:
  1. A row is a pure function of (seed, learner, position, row), as rows of text are.
  2. An exercise is either for training or for probes, decided by a hash of its content: no probe
     is ever trained on.

Shapes: P probes, W bytes of a probe's window, A bytes of the longest answer, B rows of a batch, L
bytes predicted in a row (a row holds L + 1).
"""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

Rows = npt.NDArray[np.int32]

# One content in so many is for probes.
PROBES_ONE_IN = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Bytes of the longest prompt with its answer, and of the longest answer, line's end included.
LONGEST, LONGEST_ANSWER = 24, 7
# Of each skill.
PROBES = 128


class Exercise(NamedTuple):
    """A prompt, and its one right answer.

    Attributes:
        prompt: begins with its skill's letter.
        answer: the bytes that follow, of ASCII.
        content: what decides whether the exercise is for training or for probes.
        more: what follows the answer in training, so that a row teaches more.
    """

    prompt: str
    answer: str
    content: str
    more: str = ""

    @property
    def is_probe(self) -> bool:
        """Whether it is for probes, and not for training."""
        return zlib.crc32(self.content.encode()) % PROBES_ONE_IN == 0

    @property
    def wanted(self) -> bytes:
        """What a model has to write: the answer, and a line's end if nothing else follows."""
        return self.answer.encode() + (b"" if self.more else b"\n")

    @property
    def line(self) -> bytes:
        """The exercise as it is trained on."""
        return f"{self.prompt}{self.answer}{self.more}".encode() + b"\n"


def _letters(rng: np.random.Generator, count: int) -> str:
    """Different letters."""
    return "".join(LETTERS[i] for i in rng.permutation(len(LETTERS))[:count])


def _induction(rng: np.random.Generator) -> Exercise:
    word, known = _letters(rng, 6), int(rng.integers(1, 4))
    again = word * 4
    answer = again[known : known + 3]
    return Exercise(f"I:{word}{word[:known]}", answer, f"I{word}", more=again[known + 3 :])


def _copying(rng: np.random.Generator) -> Exercise:
    word = _letters(rng, 4)
    return Exercise(f"C:{word}>", word, f"C{word}")


def _brackets(rng: np.random.Generator) -> Exercise:
    """A depth from 1 to 6, behind up to six pairs that are closed."""
    depth, pairs = int(rng.integers(1, 7)), int(rng.integers(7))
    text, opened, closed = "", 0, 0
    while opened + closed < depth + 2 * pairs:
        opens, closes = depth + pairs - opened, (pairs - closed if opened > closed else 0)
        if rng.random() * (opens + closes) < opens:
            text, opened = text + "(", opened + 1
        else:
            text, closed = text + ")", closed + 1
    return Exercise(f"B:{text}>", str(depth), f"B{text}")


def _addition(rng: np.random.Generator) -> Exercise:
    one, other = int(rng.integers(10, 90)), int(rng.integers(10))
    return Exercise(f"A:{one}+{other}>", str(one + other), f"A{one}+{other}")


def _retrieval(rng: np.random.Generator) -> Exercise:
    keys, values = _letters(rng, 3), [str(n) for n in rng.integers(10, size=3)]
    asked, *rest = ((keys[i], values[i]) for i in rng.permutation(3))
    table = "".join(key + value for key, value in zip(keys, values, strict=True))
    more = "".join(key + value for key, value in rest)
    return Exercise(f"R:{table}>{asked[0]}", asked[1], f"R{table}", more=more)


SKILLS: Mapping[str, Callable[[np.random.Generator], Exercise]] = {
    "induction": _induction,
    "copying": _copying,
    "brackets": _brackets,
    "addition": _addition,
    "retrieval": _retrieval,
}


def draw(skill: str, rng: np.random.Generator, *, probe: bool) -> Exercise:
    """Draws one exercise of a skill, for probes or for training."""
    while (exercise := SKILLS[skill](rng)).is_probe != probe:
        pass
    return exercise


def row(rng: np.random.Generator, length: int) -> Rows:
    """Returns a training row int32 [L + 1]: exercises of one skill, the last one cut off."""
    skill, text = list(SKILLS)[int(rng.integers(len(SKILLS)))], b""
    while len(text) <= length:
        text += draw(skill, rng, probe=False).line
    return np.frombuffer(text[: length + 1], np.uint8).astype(np.int32)


def mix(windows: Rows, *, share: float, first: int, batch: int, key: tuple[int, ...]) -> Rows:
    """Returns rows of text of which some are exercises instead.

    Args:
        windows: int32 [rows, L + 1], consecutive rows of a batch.
        share: the probability with which a row is one of exercises.
        first: the number of the first of these rows in their batch.
        batch: rows of the whole batch, B.
        key: seed of the batch: the run's seed, a number for the learner, and the position.
    """
    chosen_B = np.random.default_rng([*key, 0]).random(batch) < share
    mixed = windows.copy()
    for index in np.flatnonzero(chosen_B[first : first + len(windows)]):
        rng = np.random.default_rng([*key, 1 + first + int(index)])
        mixed[index] = row(rng, windows.shape[1] - 1)
    return mixed


@functools.cache
def probes(skill: str) -> tuple[Exercise, ...]:
    """Returns `PROBES` different probes of a skill, always the same."""
    rng = np.random.default_rng(zlib.crc32(skill.encode()))
    found: dict[str, Exercise] = {}
    while len(found) < PROBES:
        exercise = draw(skill, rng, probe=True)
        found.setdefault(exercise.prompt, exercise)
    return tuple(found.values())


class _Probes(NamedTuple):
    """All skills' probes as arrays.

    Attributes:
        prompts: int32 [P, W], with zeros behind each prompt.
        starts: int32 [P], where the answers begin.
        answers: int32 [P, A], with zeros behind each answer.
        is_answer: bool [P, A], False behind each answer.
    """

    prompts: Rows
    starts: Rows
    answers: Rows
    is_answer: npt.NDArray[np.bool_]


@functools.cache
def _all_probes() -> _Probes:
    every = [exercise for skill in SKILLS for exercise in probes(skill)]
    prompts_PxW = np.zeros((len(every), LONGEST), np.int32)
    answers_PxA = np.zeros((len(every), LONGEST_ANSWER), np.int32)
    starts_P = np.array([len(exercise.prompt) for exercise in every], np.int32)
    lengths_P = np.array([len(exercise.wanted) for exercise in every])
    for index, exercise in enumerate(every):
        prompts_PxW[index, : starts_P[index]] = list(exercise.prompt.encode())
        answers_PxA[index, : lengths_P[index]] = list(exercise.wanted)
    is_answer_PxA = np.arange(LONGEST_ANSWER) < lengths_P[:, None]
    return _Probes(prompts_PxW, starts_P, answers_PxA, is_answer_PxA)


Apply = Callable[[Any, jax.Array], jax.Array]
Skills = dict[str, dict[str, float]]


def make_measure(apply: Apply) -> Callable[[Any], Skills]:
    """Returns a function that measures a model's skills.

    Args:
        apply: (parameters, tokens int [P, W]) -> next-token logits, float32 [P, W, V].

    Returns:
        Parameters -> by skill, "exact": the share of probes that it passes, and "loss": mean nats
        per byte of the answers, each byte given those before it.
    """

    @jax.jit
    def measured(params: Any, given: _Probes) -> tuple[jax.Array, jax.Array]:
        rows_P, at_A = jnp.arange(len(given.starts)), jnp.arange(LONGEST_ANSWER)
        at_PxA = given.starts[:, None] + at_A

        def write(index: int, seen_PxW: jax.Array) -> jax.Array:
            at_P = given.starts + index
            logits_PxV = apply(params, seen_PxW)[rows_P, at_P - 1]
            return seen_PxW.at[rows_P, at_P].set(jnp.argmax(logits_PxV, -1), mode="drop")

        seen_PxW = jax.lax.fori_loop(0, LONGEST_ANSWER, write, jnp.asarray(given.prompts))
        written_PxA = jnp.take_along_axis(seen_PxW, at_PxA, 1, mode="clip")
        right_PxA = (written_PxA == given.answers) | ~given.is_answer
        taught_PxW = jnp.asarray(given.prompts)
        taught_PxW = taught_PxW.at[rows_P[:, None], at_PxA].set(given.answers, mode="drop")
        logits_PxAxV = apply(params, taught_PxW)[rows_P[:, None], at_PxA - 1]
        losses_PxA = optax.softmax_cross_entropy_with_integer_labels(logits_PxAxV, given.answers)
        losses_P = jnp.sum(losses_PxA * given.is_answer, 1) / given.is_answer.sum(1)
        return losses_P, right_PxA.all(1)

    def measure(params: Any) -> Skills:
        found = (
            np.asarray(values).reshape(len(SKILLS), -1)
            for values in measured(params, _all_probes())
        )
        losses, exact = (values.mean(1) for values in found)
        return {
            skill: {"loss": float(losses[index]), "exact": float(exact[index])}
            for index, skill in enumerate(SKILLS)
        }

    return measure
