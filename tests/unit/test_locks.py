"""Each extra has a lock, which adds to requirements.lock and contradicts nothing in it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("arrow", "cuda", "keras", "notebook", "tensorboard", "tokens", "torch", "tpu", "trainers",
          "tunix", "wandb")  # fmt: skip
PIN = re.compile(r"^([a-zA-Z0-9._-]+)(?:\[[a-z0-9,-]+\])?==(\S+)", re.MULTILINE)


def pins(path: Path) -> dict[str, str]:
    return dict(PIN.findall(path.read_text()))


def direct(extra: str) -> set[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = document["project"]["optional-dependencies"][extra]
    return {re.split(r"[\[>=]", requirement)[0] for requirement in needed}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_lock_adds_what_its_extra_needs(extra: str) -> None:
    base, own = pins(ROOT / "requirements.lock"), pins(ROOT / f"locks/{extra}.lock")
    assert own
    assert not set(own) & set(base)
    # Whoever has trainers has torch, of torch.lock or a build of their own.
    others = {"torch"} if extra == "trainers" else set()
    assert direct(extra) <= set(own) | set(base) | others


@pytest.mark.parametrize("name", [*EXTRAS, "lm-eval", "oracle", "runtime", "stores"])
def test_a_lock_has_hashes_and_no_address(name: str) -> None:
    text = (ROOT / f"locks/{name}.lock").read_text()
    assert "://" not in text
    entries = re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)


def test_machines_get_what_the_package_needs_and_no_tools_of_developers() -> None:
    base, own = pins(ROOT / "requirements.lock"), pins(ROOT / "locks/runtime.lock")
    assert set(own.items()) < set(base.items())
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[>=]", one)[0] for one in document["dependencies"]}
    assert {name.replace("_", "-") for name in needed | direct("buckets")} <= set(own)
    tools = direct("dev") - direct("buckets") - {"psutil", "pyyaml"}
    assert not tools & set(own)


def test_plugins_of_jax_are_of_the_version_that_is_pinned() -> None:
    jax = pins(ROOT / "requirements.lock")["jax"]
    own = pins(ROOT / "locks/cuda.lock")
    assert {own["jax-cuda12-plugin"], own["jax-cuda12-pjrt"]} == {jax}


def test_models_are_held_against_the_transformers_that_trainers_run_with() -> None:
    names = ("lm-eval", "oracle", "trainers")
    assert len({pins(ROOT / f"locks/{name}.lock")["transformers"] for name in names}) == 1
