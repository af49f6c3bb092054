"""Accelerators are found without touching them, and divided; of invented machines."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process.accelerators import Accelerators, find_accelerators, unused
from diloco.common.process.config import environment, environment_with, tasks_of_step
from diloco.common.protocol.errors import ConfigError
from diloco.learner import library
from diloco.learner.member import Member
from diloco.operate.local.hardware import (
    CONTEXT_BYTES,
    LEAST_BYTES,
    Hardware,
    ProcessAccelerators,
    divide,
    on_accelerators,
    on_cpu,
    set_hardware,
)

GPU_BYTES = 80 << 30


def wants(devices: int | None = None, hosts: int = 1) -> Hardware:
    return Hardware(devices or 1, hosts, forced=devices is not None)


def gpus(count: int, memory_bytes: int = GPU_BYTES) -> Accelerators:
    names = tuple(str(index) for index in range(count))
    return Accelerators(kind="cuda", names=names, memory_bytes=memory_bytes)


def chips(count: int) -> Accelerators:
    return Accelerators(kind="tpu", names=tuple(str(index) for index in range(count)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine without accelerators; its programs are in `bin`."""
    for folder in ("dev", "bin", "sys/bus/pci/devices/0000:00:01.0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:00:01.0/vendor").write_text("0x8086\n")
    (tmp_path / "sys/bus/pci/devices/0000:00:01.0/device").write_text("0x0063\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def install_driver(machine: Path, script: str) -> None:
    tool = machine / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def plug_chips(machine: Path, count: int) -> None:
    for index in range(count):
        folder = machine / f"sys/bus/pci/devices/0000:01:0{index}.0"
        folder.mkdir()
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text("0x0063\n")


def test_a_machine_without(machine: Path) -> None:
    assert find_accelerators(machine) is None


def test_what_the_driver_says(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(machine, "echo '0, GPU-aa, 81559'; echo '1, GPU-bb, 40960'")
    found = find_accelerators(machine)
    assert found is not None
    assert (found.kind, found.names, found.memory_bytes) == ("cuda", ("0", "1"), 40960 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    found = find_accelerators(machine)
    assert found is not None
    assert found.names == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_accelerators(machine) is None


@pytest.mark.parametrize("script", ["exit 9", "echo NVIDIA-SMI has failed", "echo '0, GPU, [N/A]'"])
def test_a_driver_that_says_nothing_of_use(machine: Path, script: str) -> None:
    install_driver(machine, script)
    assert find_accelerators(machine) is None
    for index in (0, 10, 2):
        (machine / f"dev/nvidia{index}").touch()
    (machine / "dev/nvidiactl").touch()
    found = find_accelerators(machine)
    assert found is not None
    assert (found.names, found.memory_bytes) == (("0", "2", "10"), 0)


def test_chips_of_a_tpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_chips(machine, 4)
    found = find_accelerators(machine)
    assert found is not None
    assert (found.kind, found.names) == ("tpu", ("0", "1", "2", "3"))
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "2,3")
    found = find_accelerators(machine)
    assert found is not None
    assert found.names == ("2", "3")


def test_jax_without_support_is_told_loudly() -> None:
    found = Accelerators(kind="cuda", names=("0",), usable=False)
    assert "this machine has 1 GPU" in unused(found)
    assert "diloco[cuda]" in unused(found)
    assert "does not see" in unused(chips(4))


@pytest.mark.parametrize(
    ("like", "asked", "told"),
    [
        pytest.param(jnp.zeros(2), "", True, id="jax"),
        pytest.param(jnp.zeros(2), "cpu", False, id="as the user wants it"),
        pytest.param(np.zeros(2), "", False, id="another framework"),
    ],
)
def test_a_learner_on_the_cpu_of_such_a_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, like: object, asked: str, *, told: bool
) -> None:
    monkeypatch.setattr(library, "find_accelerators", lambda: chips(4))
    monkeypatch.setattr(library, "wants_cpu", lambda: asked == "cpu")
    member = Member.of({"w": like}, learner="a", anchor="device", tokens_per_step=1)
    with structlog.testing.capture_logs() as lines:
        library.warn_of_unused_accelerators("demo", member)
    assert [line["event"] for line in lines] == ["accelerator_unused"] * told


# --- Division


@given(st.integers(1, 16), st.integers(1, 12))
def test_each_learner_has_its_own_gpus_or_a_part_of_one(count: int, learners: int) -> None:
    shares = divide(gpus(count), {f"l{i}": wants() for i in range(learners)})
    taken: dict[str, float] = {}
    for (share,) in shares.values():
        assert share.names
        for name in share.names:
            taken[name] = taken.get(name, 0.0) + (share.memory or 0.9)
    assert set(taken) <= {str(index) for index in range(count)}
    assert all(part <= 0.9 + 1e-9 for part in taken.values())
    sizes = {len(share.names) for (share,) in shares.values()}
    assert len(sizes) == 1
    if learners <= count:
        assert all(share.memory is None for (share,) in shares.values())


def test_one_learner_takes_all() -> None:
    assert divide(gpus(3), {"a": wants()}) == {
        "a": (ProcessAccelerators("cuda", ("0", "1", "2"), whole_machine=True),)
    }


def test_unequal_learners_and_processes() -> None:
    shares = divide(gpus(8), {"a": wants(4, 2), "b": wants(2), "c": wants()})
    assert [share.names for share in shares["a"]] == [("0", "1"), ("2", "3")]
    assert [share.names for share in shares["b"]] == [("4", "5")]
    assert [share.names for share in shares["c"]] == [("6", "7")]


@pytest.mark.parametrize(
    ("found", "wanted", "says"),
    [
        (gpus(2), {"a": wants(2), "b": wants(1)}, "2 learners want 3 GPUs, and this machine has 2 GPUs"),
        (gpus(1), {"a": wants(1), "b": wants(1)}, "2 learners want 2 GPUs, and this machine has 1 GPU"),
        (chips(1), {"a": wants(), "b": wants()}, "A TPU chip cannot be shared"),
        (chips(8), {"a": wants(3)}, "a would have 3 TPU chips in 1 process"),
        (chips(4), {"a": wants(2, 2), "b": wants(1)}, "in 2 process"),
        (gpus(3), {"a": wants(3, 2)}, "2 processes cannot share the 3 GPUs of a"),
        (gpus(1, 8 << 30), {f"l{i}": wants() for i in range(8)}, "8 learners cannot share one GPU"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused(
    found: Accelerators, wanted: dict[str, Hardware], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        divide(found, wanted)
    assert "--cpu" in (raised.value.hint or "") or "--hosts" in (raised.value.hint or "")


def test_parts_leave_room_for_cuda_itself() -> None:
    memory = 24 << 30
    shares = divide(gpus(1, memory), {f"l{i}": wants() for i in range(4)})
    parts = [share.memory for (share,) in shares.values()]
    assert all(part is not None and part * memory >= LEAST_BYTES for part in parts)
    assert sum(part or 0 for part in parts) * memory + 4 * CONTEXT_BYTES <= 0.9 * memory


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (1, True)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (2, True)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}, (8, False)),
        ({"SLURM_STEP_NUM_TASKS": "24", "SLURM_STEP_TASKS_PER_NODE": "10(x2),4"}, (24, False)),
    ],
)
def test_tasks_of_a_step_of_slurm(
    variables: dict[str, str], found: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tasks_of_step() == found


def test_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    (part,) = divide(gpus(1, 0), {"a": wants(), "b": wants()})["b"]
    found = environment_with(part.environment())
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.450"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    (two,) = divide(chips(4), {"a": wants(2), "b": wants(2)})["b"]
    assert two.environment() == {
        "JAX_PLATFORMS": "tpu,cpu", "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_PROCESS_BOUNDS": "1,1,1",
    }  # fmt: skip
    (all_of_it,) = divide(chips(4), {"a": wants()})["a"]
    assert all_of_it.environment() == {"JAX_PLATFORMS": "tpu,cpu"}
    assert all_of_it.words() == "TPU chip 0, 1, 2, 3"
    assert part.words() == "45% of GPU 0"


def test_a_local_run_on_them() -> None:
    names = ["learner-0", "learner-1"]
    plain = set_hardware({}, names, None, None)
    assert on_accelerators(plain, gpus(4))["learner-1"].words() == "GPU 2, 3"
    assert on_accelerators(plain, gpus(4))["learner-1"].arguments() == []
    assert on_cpu(plain)["learner-1"].arguments() == ["--cpu-devices", "1"]
    meshes = set_hardware({}, names, "2,1", None)
    assert on_accelerators(meshes, gpus(4))["learner-1"].words() == "GPU 2"
    assert on_cpu(meshes)["learner-0"].arguments() == ["--cpu-devices", "2"]


def test_the_users_own_choice_reaches_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    # A command that another test ran in this process may have kept off accelerators.
    monkeypatch.setattr(environment._Platforms, "pinned", False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert environment_with({})["JAX_PLATFORMS"] == "cuda"
    assert os.environ["JAX_PLATFORMS"] == "cuda"
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX_PLATFORMS" not in environment_with({})
