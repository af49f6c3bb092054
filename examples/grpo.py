"""GRPO on sums; follower processes beside the learners make rollouts. Task: examples.grpo:build.

python examples/grpo.py run FOLDER [SEED [options of diloco local]]   # two learners, two followers
python examples/grpo.py alone FOLDER [SEED [1 or 2 batches a step]]   # a loop in one process
python examples/grpo.py compare FOLDER [SEEDS]                        # reward over time

A follower gets each version soon after it was made. It draws sums, samples several answers to each,
and writes a file for each batch: tokens, the version that sampled them, log-probabilities, rewards.
GRPO's ratios use those log-probabilities, so that a sample may be some versions old. The files
stay: a learner that restarts reads them again.
"""

import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco
from diloco import CausalLM, Task

PLUS, EQUALS = 10, 11  # the tokens behind the ten digits
MODEL = CausalLM.of({
    "model_type": "llama", "vocab_size": 12, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
}, remat=False)  # fmt: skip
TERMS = 5  # 0 + 0 to 4 + 4: an answer is one token
SUMS, GROUP, CLIP, ENTROPY = 8, 12, 0.2, 0.02
STEPS, RATE, AHEAD = 240, 1e-3, 1
LEARNERS = "learner-0", "learner-1"


def initial(seed=0):
    return MODEL.init(jax.random.key(seed))


@jax.jit
def answer(params, prompts, key):
    """Sample an answer to each prompt [B, 4]; return it and its log-probability, float32 [B]."""
    logp = jax.nn.log_softmax(MODEL.logits(params, prompts)[:, -1])
    drawn = jax.random.categorical(key, logp)
    return drawn, jnp.take_along_axis(logp, drawn[:, None], 1)[:, 0]


def rollouts(params, at, *, version, step):
    """Make a batch by a version: sums, each answered GROUP times. `at` seeds the generator."""
    rng = np.random.default_rng(at)
    first, second = rng.integers(TERMS, size=(2, SUMS, 1)).repeat(GROUP, 2).reshape(2, -1)
    signs = np.full_like(first, PLUS), np.full_like(first, EQUALS)
    prompts = np.stack([first, signs[0], second, signs[1]], 1).astype(np.int32)
    drawn, logp = answer(params, prompts, jax.random.key(rng.integers(1 << 31)))
    rewards = np.asarray(drawn == first + second, np.float32)  # 1 if the answer is correct
    group = rewards.reshape(SUMS, GROUP)
    gain = (group - group.mean(1, keepdims=True)) / (group.std(1, keepdims=True) + 0.1)
    one = np.ones_like(rewards)
    return {
        "prompts": prompts, "answers": np.asarray(drawn), "logp": np.asarray(logp),
        "rewards": rewards, "gain": gain.ravel(), "version": version * one, "step": step * one,
    }  # fmt: skip


def loss(params, batch, key):
    logp = jax.nn.log_softmax(MODEL.logits(params, batch["prompts"])[:, -1])
    ratio = jnp.exp(jnp.take_along_axis(logp, batch["answers"][:, None], 1)[:, 0] - batch["logp"])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    entropy = -(jnp.exp(logp) * logp).sum(-1).mean()
    gained = jnp.minimum(ratio * batch["gain"], clipped * batch["gain"]).mean()
    metrics = {"reward": batch["rewards"].mean(), "clipped": (ratio != clipped).mean()}
    return -gained - ENTROPY * entropy, metrics


def build(*, steps: int, seed: int, samples: str, rate: float = RATE) -> Task:
    def batches(learner, position):
        folder = Path(samples) / learner
        while True:
            if learner == "probe":  # the learner's name in `diloco check`, which has no follower
                yield rollouts(initial(), [seed, position], version=0, step=0)
            else:
                yield take(folder, position)
            position += 1

    def evaluate(params):
        batch = [rollouts(params, [1, one], version=0, step=0)["rewards"] for one in range(8)]
        return {"loss": 1 - np.mean(batch), "reward": np.mean(batch)}

    return Task(init=MODEL.init, loss=loss, batches=batches, evaluate=evaluate,
                tokens_per_batch=SUMS * GROUP, optimizer=optax.adam(rate, b2=0.99),
                files=MODEL.files)  # fmt: skip


def file_of(folder, position):
    return folder / f"{position:06}.npz"


def take(folder, position):
    """Ask the follower for the batch at a position, and wait until it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wanted").write_text(str(position))
    while not (path := file_of(folder, position)).exists():
        time.sleep(0.01)
    return dict(np.load(path))


def write(folder, position, batch):
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{position:06}.part.npz"
    np.savez(part, **batch)
    part.rename(file_of(folder, position))


def rollout(run, learner, samples):
    """Follow a run until its end, and write a learner's batches, each by the newest version."""
    folder, seed = Path(samples) / learner, diloco.load_config(run).run.seed
    paths, like = jax.tree.flatten_with_path(jax.eval_shape(initial))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    leaves = [np.empty(leaf.shape, np.float32) for _, leaf in paths]
    position = len([*folder.glob("??????.npz")])
    waiting = {}  # position -> version of each batch that the learner has not taken
    with diloco.follow(run) as model:
        change = model.take()
        while change is not None:
            for leaf in change.leaves:
                leaves[names.index(leaf.name)][leaf.rows] = leaf.values
            params, at = jax.tree.unflatten(like, leaves), change
            while (change := model.take(within_s=0.01)) is None and not model.ended:
                for taken in [one for one in waiting if one < wanted(folder)]:
                    with (folder / "ages").open("a") as file:
                        print(at.version - waiting.pop(taken), file=file)
                if position < wanted(folder) + AHEAD:
                    words = [seed, zlib.crc32(learner.encode()), position]
                    batch = rollouts(params, words, version=at.version, step=at.global_step)
                    write(folder, position, batch)
                    waiting[position] = at.version
                    position += 1


def wanted(folder):
    try:
        return int((folder / "wanted").read_text() or 0)
    except FileNotFoundError:
        return 0


def started(*words, **how):
    return subprocess.Popen([sys.executable, "-m", *map(str, words)], **how)  # noqa: S603


def run(folder, seed=0, *more):
    home, samples = Path(folder) / "run", (Path(folder) / "samples").absolute()
    settings = {
        "task.options.samples": f'"{samples}"', "run.seed": seed, "quorum.min_learners": 2,
        "sync.mode": '"lockstep"', "sync.fragments": 1, "sync.interval_steps": 2,
        "sync.overlap_steps": 0, "sync.min_steps": 2,
        "outer.optimizer": '"sgd"', "outer.learning_rate": 1.0,
    }  # fmt: skip
    local = ["--task", "examples.grpo:build", "--learners", 2, "--steps", STEPS, "--cpu"]
    local += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    trains = started("diloco", "local", "--run-dir", home, *local, *more)
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    while started("diloco", "status", home, **quiet).wait() and trains.poll() is None:
        time.sleep(1.0)
    own = ["examples.grpo", "rollout", home / "run.toml"]
    follows = [started(*own, learner, samples) for learner in LEARNERS]
    while trains.poll() is None:
        if any(one.poll() for one in follows):
            trains.terminate()  # else its learners would wait for batches
        time.sleep(0.5)
    for one in follows:
        one.terminate()
    show(samples)


def alone(folder, seed=0, learners=1):
    """Train in one process, each step on the batches of so many learners."""
    samples = Path(folder) / "samples"
    task = build(steps=STEPS, seed=int(seed), samples=str(samples))
    params = initial(int(seed))
    state = task.optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        gradient = jax.grad(loss, has_aux=True)(params, batch, None)[0]
        moves, state = task.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, moves), state

    for position in range(STEPS):
        each = []
        for learner in LEARNERS[: int(learners)]:
            words = [int(seed), zlib.crc32(learner.encode()), position]
            each.append(rollouts(params, words, version=position, step=position))
            write(samples / learner, position, each[-1])
        batch = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
        params, state = step(params, state, batch)
    show(samples)


def curve(samples, parts=8):
    """Mean reward of the samples in each part of the training, by version, [parts]."""
    found = [[] for _ in range(parts)]
    for path in Path(samples).glob("*/??????.npz"):
        batch = np.load(path)
        part = int(batch["step"][0]) * parts // STEPS
        found[min(part, parts - 1)].append(batch["rewards"].mean())
    return np.array([np.mean(each) for each in found if each])


def show(samples):
    print("reward:", *(f"{one:.2f}" for one in curve(samples)))
    ages = [int(one) for path in Path(samples).glob("*/ages") for one in path.read_text().split()]
    if ages:
        print(f"samples were {np.mean(ages):.2f} versions old when trained on, at most {max(ages)}")


def compare(folder, seeds=5):
    found = {"run": [], "alone 1": [], "alone 2": []}
    for seed in range(int(seeds)):
        for name, curves in found.items():
            home = Path(folder) / f"{name}-{seed}"
            if not home.exists():
                part, *more = name.split()
                started("examples.grpo", part, home, seed, *more).wait()
            curves.append(curve(home / "samples"))
    for name, curves in found.items():
        print(f"{name}:", *(f"{one:.2f}" for one in np.mean(curves, 0)))
        print("  ±", *(f"{one:.2f}" for one in np.std(curves, 0, ddof=1)))


if __name__ == "__main__":
    known = {"run": run, "rollout": rollout, "alone": alone, "compare": compare}
    if len(sys.argv) < 3 or sys.argv[1] not in known:
        sys.exit(__doc__)
    known[sys.argv[1]](*sys.argv[2:])
