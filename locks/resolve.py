"""Write EXTRA.lock beside this file: what `diloco[EXTRA]` needs besides requirements.lock, pinned.

    python locks/resolve.py UV [OPTION ...]

`make lock` does it. Each file is installed together with requirements.lock, whose versions hold,
but those of `APART`, which are installed alone. runtime.lock is the part of requirements.lock that
daemons need: what a release has, without the tools of developers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
BASE = ROOT / "requirements.lock"
EXTRAS = ("arrow", "cuda", "keras", "notebook", "tensorboard", "tokens", "torch", "tpu", "trainers",
          "tunix", "wandb")  # fmt: skip
# Of the releases: which extras runtime.lock has.
RUNTIME = ("buckets",)
# Programs for tests, each in an environment of its own: they need other versions than ours.
APART = {
    "lm-eval": "lm_eval[hf]>=0.4.13,<0.5",
    "oracle": "transformers>=5.24\njinja2>=3\npeft>=0.18",
    "stores": "moto[s3,server]>=5",
}
# torch.lock has torch; or it is a build for this machine, as the Makefile says. TensorFlow is what
# keras-hub asks for and, on the JAX backend, does not import; nor do tunix's models import its
# data sets.
WITHOUT = "{} ; python_version < '3'\n"
LEFT_OUT = {
    "keras": ("tensorflow-text",),
    "trainers": ("torch",),
    "tunix": ("datasets", "tensorflow-datasets"),
}
# The locks beside which an extra's is installed, in one environment; the oracle's transformers is
# the version that trainers run with.
BESIDE = {
    "keras": ("torch", "trainers"),
    "trainers": ("torch",),
    "tunix": ("torch", "trainers", "keras"),
    "lm-eval": ("trainers",),
    "oracle": ("trainers",),
}
OPTIONS = ("--universal", "--python-version", "3.11", "--fork-strategy", "fewest",
           "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header",
           "--no-annotate")  # fmt: skip


def entries(text: str) -> dict[str, str]:
    """Requirements with their hashes, by package."""
    found = re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)
    return {re.split(r"[=\[ ;]", entry)[0]: entry for entry in found if entry.strip()}


def limits(extra: str) -> list[str]:
    """The options that hold the versions of the locks beside which one is installed."""
    return [w for o in BESIDE.get(extra, ()) for w in ("--constraint", str(HERE / f"{o}.lock"))]


def resolve(uv: str, extra: str, *options: str) -> str:
    """The entries that an extra adds, without those that are left out."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write("".join(map(WITHOUT.format, LEFT_OUT.get(extra, ()))))
        override.flush()
        done = subprocess.run(
            [uv, "pip", "compile", "pyproject.toml", "--quiet", "--extra", extra,
             "--constraint", BASE, *limits(extra), "--override", override.name, *OPTIONS, *options],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    base = entries(BASE.read_text())
    return "".join(text for name, text in entries(done.stdout).items() if name not in base)


def resolve_runtime(uv: str, *options: str) -> str:
    """The entries of requirements.lock that are no tools of developers."""
    extras = [word for extra in RUNTIME for word in ("--extra", extra)]
    done = subprocess.run(
        [uv, "pip", "compile", "pyproject.toml", "--quiet", *extras, "--constraint", BASE,
         *OPTIONS, *options],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    needed = entries(done.stdout)
    return "".join(text for name, text in entries(BASE.read_text()).items() if name in needed)


def resolve_apart(uv: str, name: str, *options: str) -> str:
    """The entries of an environment that has nothing of ours."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write(WITHOUT.format("torch"))
        override.flush()
        done = subprocess.run(
            [uv, "pip", "compile", "-", "--quiet", *limits(name), "--override", override.name,
             *OPTIONS, *options],
            cwd=ROOT, input=APART[name], capture_output=True, text=True, check=True,
        )  # fmt: skip
    return done.stdout


def main() -> None:
    """Resolve all."""
    uv, *options = sys.argv[1:]
    (HERE / "runtime.lock").write_text(resolve_runtime(uv, *options))
    for extra in sorted(EXTRAS, key=lambda extra: len(BESIDE.get(extra, ()))):
        (HERE / f"{extra}.lock").write_text(resolve(uv, extra, *options))
    for name in APART:
        (HERE / f"{name}.lock").write_text(resolve_apart(uv, name, *options))


if __name__ == "__main__":
    main()
