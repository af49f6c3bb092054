"""Data-parallel training, the baseline of the headline benches, made to win.

N machines train one model as one `jax.distributed` job over gloo: the same task, data, optimizer
and schedule as a run's learners, one global batch, which is the learners' batches put together. A
machine is an agent, which holds every import and the data and forks the job's worker at once. When
a machine dies the scheduler ends the other workers in the same instant and starts all of them again
from the last checkpoint as soon as every machine is there.

What it is given: checkpoints are orbax's asynchronous ones, written by one rank while training goes
on, as often as is best for the failure rate; compiled programs are kept; survivors import nothing
again; a death is noticed at once; the exchange of gradients hides under the backward pass, two
thirds of a step; each gradient travels as one flat vector, reduced and gathered in parts, in
bfloat16 if wished.

    python -m bench.data_parallel [--processes 2] [--steps 20] [--preset tiny] [--step-s 0.1]
"""

import argparse
import contextlib
import json
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from diloco.common.process.nats_server import free_port
from diloco.learner.hosts.messages import wait_for_hosts
from diloco.operate.local.reaper import Reaper

# What share of a step's time has passed when its backward pass, and so the exchange, begins.
FORWARD = 1 / 3
INITIALIZE_S = 120
# An agent of this machine looks for news so often.
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parameters of a job; a file of them is all that an agent is told.

    Attributes:
        folder: shared by all machines: progress and checkpoints.
        programs: folder of compiled programs, which may be another job's; in `folder` if "".
        hosts: address of each machine; rank i is on the i-th.
        steps: length of the schedule.
        step_s: seconds that a device works on a step.
        gradient: dtype in which gradients travel: "float32" or "bfloat16".
        checkpoint_steps: steps between two checkpoints, 0 for none.
        task: options of `bench.tasks.plain`.
    """

    folder: str
    hosts: list[str]
    steps: int
    seed: int
    step_s: float
    gradient: str = "float32"
    checkpoint_steps: int = 0
    programs: str = ""
    task: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """N."""
        return len(self.hosts)

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    def save(self) -> Path:
        """Write the agents' file."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path


class StepDone(NamedTuple):
    """One step of the job was finished at `at_s`, by the start number `life` of the job."""

    at_s: float
    life: int
    step: int


# --- A worker: one process of the job, for as long as all of them live


class JobWorker:
    """Rank `rank` of life number `life` of the job, in a process forked by an agent."""

    def __init__(self, job: Job, task: Any, like: Any, rank: int, life: int, address: str) -> None:
        import jax
        from jaxlib import _jax

        self.job, self.task, self.like, self.rank, self.life = job, task, like, rank, life
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_compilation_cache_dir", str(job.path / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        # Gloo would listen on the address of the host's name, which another machine may not reach.
        listen = partial(_jax.make_gloo_tcp_collectives, hostname=job.hosts[rank])
        _jax.make_gloo_tcp_collectives = listen
        jax.distributed.initialize(
            address, job.processes, rank, initialization_timeout=INITIALIZE_S
        )
        self.mesh = jax.make_mesh((job.processes,), ("data",))
        self.replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.split = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("data"))
        self.inner_step: Any = None
        self.saver = JobCheckpoints(job, rank)

    def run(self) -> None:
        """Train to the last step, or until killed."""
        import numpy as np

        from bench.tasks import Device

        step, state = self._begin()

        device = Device(self.job.step_s)
        batches = self.task.batches(f"learner-{self.rank}", step)
        progress = (self.job.path / "progress").open("a", buffering=1)
        while step < self.job.steps:
            device.begin()
            batch = self._global(next(batches))
            device.wait(FORWARD)
            number = np.int32(step)
            if self.inner_step is None:
                self.inner_step = self._compiled(*state, batch, number)
                # One may have compiled for longer than gloo waits for it.
                wait_for_hosts()
            *state, loss = self.inner_step(*state, batch, number)
            device.wait()
            loss.block_until_ready()
            step += 1
            if self.rank == 0:
                progress.write(f"{time.time():.6f} {self.life} {step}\n")
                if self.job.checkpoint_steps and step % self.job.checkpoint_steps == 0:
                    self.saver.save(step, state)
        self.saver.close()
        # Nobody leaves before rank 0 has noted the last step: it would look like a failure.
        wait_for_hosts()

    def _compiled(self, *arguments: Any) -> Any:
        """The step as a program. JAX's own cache serves rank 0 alone, and traces first."""
        from jax.experimental import serialize_executable as programs

        path = Path(self.job.programs or self.job.folder) / f"program-{self.rank}"
        if path.exists():
            return programs.deserialize_and_load(*pickle.loads(path.read_bytes()))
        program = make_step(self.task, self.mesh, self.job.gradient).lower(*arguments).compile()
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(programs.serialize(program)))
        part.rename(path)
        return program

    def _begin(self) -> tuple[int, list[Any]]:
        """Where the job goes on: the newest checkpoint, or new parameters and state."""
        import jax

        found = self.saver.restore(self.like)
        if found is None:
            fresh = partial(first_state, self.task, self.job.seed)
            return 0, list(jax.jit(fresh, out_shardings=self.replicated)())
        step, state = found
        return step, list(jax.tree.map(self._replicate, state))

    def _replicate(self, array: Any) -> Any:
        import jax

        return jax.make_array_from_process_local_data(self.replicated, array)

    def _global(self, batch: Any) -> Any:
        import jax

        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(self.split, leaf), batch
        )


def first_state(task: Any, seed: int) -> tuple[Any, Any]:
    """(parameters, optimizer state) before the first step."""
    import jax

    params = task.init(jax.random.key(seed))
    return params, task.optimizer.init(params)


def make_step(task: Any, mesh: Any, gradient_dtype: str) -> Any:
    """The jitted step of the whole job: (parameters, state, global batch, step) -> the next ones.

    As `learner.inner_step.make_inner_step`, but for the mean of the gradients over all processes.
    """
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree
    from jax.sharding import PartitionSpec

    def local(params: Any, state: Any, batch: Any, step: Any) -> tuple[Any, Any, Any]:
        key = jax.random.key(0)
        said = lambda params: task.evaluated(params, batch, key).loss  # noqa: E731
        loss, gradient = jax.value_and_grad(said)(params)
        flat, unflatten = ravel_pytree(gradient)
        mean = mean_of(flat, jnp.dtype(gradient_dtype), mesh.size)
        direction, state = task.optimizer.update(unflatten(mean), state, params)
        rate = task.schedule(step)
        params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), params, direction)
        return params, state, loss

    def mean_of(flat: Any, dtype: Any, size: int) -> Any:
        """Everybody sums a part and sends it to all: the bytes of a ring, without its rounds.

        XLA's own sum would send float32 on CPU in any case.
        """
        bits = jnp.uint16 if dtype.itemsize == 2 else jnp.uint32
        parts = jnp.pad(flat, (0, -len(flat) % size)).reshape(size, -1).astype(dtype)
        mine = jax.lax.all_to_all(jax.lax.bitcast_convert_type(parts, bits), "data", 0, 0)
        mine = jax.lax.bitcast_convert_type(mine, dtype).astype(jnp.float32).sum(0) / size
        mine = jax.lax.bitcast_convert_type(mine.astype(dtype), bits)
        whole = jax.lax.all_gather(mine, "data", tiled=True)[: len(flat)]
        return jax.lax.bitcast_convert_type(whole, dtype).astype(flat.dtype)

    everywhere, split = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(everywhere, everywhere, split, everywhere),
        out_specs=(everywhere, everywhere, everywhere),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


class JobCheckpoints:
    """The job's checkpoints: rank 0 writes, everybody reads."""

    def __init__(self, job: Job, rank: int) -> None:
        from orbax import checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.CRITICAL)
        alone = ocp.options.MultiprocessingOptions(
            primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"rank{rank}"
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            create=False,
            enable_async_checkpointing=rank == 0,
            read_only=rank != 0,
            multiprocessing_options=alone,
        )
        folder = job.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        self._manager = ocp.CheckpointManager(
            folder, options=options, item_names=("state",),
            item_handlers={"state": ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)},
        )  # fmt: skip
        self._log = job.path / "saves"

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """(step, state) of the newest one, on the host; None if there is none."""
        import jax
        import numpy as np
        from orbax import checkpoint as ocp

        step = self._manager.latest_step()
        if step is None:
            return None
        how = ocp.args.PyTreeRestore(
            item=like,
            restore_args=jax.tree.map(
                lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype), like
            ),
        )
        return step, self._manager.restore(step, args=ocp.args.Composite(state=how))["state"]

    def save(self, step: int, state: Any) -> None:
        """Begin one; what training waits for is noted, with what the one before took in all."""
        import jax
        import numpy as np
        from orbax import checkpoint as ocp

        began_s = time.monotonic()
        copies = jax.tree.map(lambda leaf: np.array(leaf.addressable_data(0)), tuple(state))
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(copies)))
        with self._log.open("a") as log:
            log.write(f"{step} {time.monotonic() - began_s:.4f}\n")

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.wait_until_finished()


# --- An agent: one machine


def agent(path: Path, rank: int) -> None:
    """Fork a worker whenever told "start LIFE ADDRESS", end it when told "stop", report its end."""
    job = Job(**json.loads(path.read_text()))
    import jax
    import jax.experimental.serialize_executable
    import jax.flatten_util
    from orbax import checkpoint as ocp

    from bench import tasks

    assert ocp.__name__
    task = tasks.plain(steps=job.steps, seed=job.seed, **job.task)
    like = jax.eval_shape(partial(first_state, task, job.seed))
    print("ready", flush=True)
    worker = life = 0
    while True:
        heard = select.select([sys.stdin], [], [], POLL_S)[0]
        if worker and os.waitpid(worker, os.WNOHANG) != (0, 0):
            worker = 0
            print(f"exited {life}", flush=True)
        if not heard:
            continue
        for line in os.read(sys.stdin.fileno(), 4096).decode().splitlines() or ["end"]:
            word, *rest = line.split()
            if worker:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
                worker = 0
            if word == "end":
                return
            if word == "start":
                life = int(rest[0])
                worker = _fork(partial(JobWorker, job, task, like, rank, life, rest[1]))
                print(f"worker {life} {worker}", flush=True)


def _fork(make: Callable[[], JobWorker]) -> int:
    """A worker; its process id. The agent has one thread and no JAX backend: forking is safe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of any fork
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        make().run()
        status = 0
    except Exception:  # noqa: BLE001 - the child must not go on as an agent
        traceback.print_exc()
    finally:
        os._exit(status)


# --- The scheduler


@dataclass
class Machine:
    """An agent as the scheduler sees it; `agent` is None while the machine is away."""

    rank: int
    agent: "subprocess.Popen[bytes] | None" = None
    ready: bool = False
    worker: int | None = None
    unread: bytes = b""

    def words(self) -> Iterator[list[str]]:
        """The agent's lines that have come, as words."""
        assert self.agent is not None
        assert self.agent.stdout is not None
        pipe = self.agent.stdout.fileno()
        while select.select([pipe], [], [], 0)[0]:
            came = os.read(pipe, 4096)
            self.unread += came
            if not came:
                yield ["gone"]
                return
        *lines, self.unread = self.unread.split(b"\n")
        yield from (line.decode().split() for line in lines)

    def tell(self, line: str) -> None:
        """Give the agent an order."""
        assert self.agent is not None
        assert self.agent.stdin is not None
        self.agent.stdin.write(f"{line}\n".encode())
        self.agent.stdin.flush()


class Scheduler:
    """Starts machines, and the job on them whenever all are there. `look` must be called often.

    Args:
        job: the job.
        prefix: of the command that starts the agent of rank i, such as to enter a namespace.
        cores: of the agent of rank i; None for any.
    """

    def __init__(
        self, job: Job, prefix: Callable[[int], list[str]] = lambda _: [],
        cores: Callable[[int], set[int] | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.job, self._prefix, self._cores = job, prefix, cores
        self._path = job.save()
        self._reaper = Reaper()
        self._log = (job.path / "log").open("ab")
        self.machines = [Machine(rank) for rank in range(job.processes)]
        self.life = 0
        self.running = False
        self.done = False

    def start(self, rank: int) -> None:
        """A machine is there, or there again: its agent starts from nothing."""
        command = [*self._prefix(rank), sys.executable, "-m", "bench.data_parallel"]
        process = subprocess.Popen(
            [*command, "--agent", str(self._path), "--rank", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._reaper.watch(process.pid)
        if cores := self._cores(rank):
            os.sched_setaffinity(process.pid, cores)
        self.machines[rank] = Machine(rank, process)

    def kill(self, rank: int) -> None:
        """SIGKILL everything of a machine."""
        machine = self.machines[rank]
        self._end(machine)
        self.machines[rank] = Machine(rank)
        self._stop()

    def _end(self, machine: Machine) -> None:
        """SIGKILL a machine's agent, and the worker, which may have failed a moment ago."""
        assert machine.agent is not None
        machine.agent.kill()
        if machine.worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(machine.worker, signal.SIGKILL)
            self._reaper.forget(machine.worker)
        machine.agent.wait()
        for pipe in (machine.agent.stdin, machine.agent.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._reaper.forget(machine.agent.pid)

    def look(self) -> None:
        """Hear the agents; end the job's life if a worker has ended, begin one if all are there."""
        ended = [self._hear(machine) for machine in self.machines]
        if any(ended):
            steps = self.progress()
            self.done = bool(steps) and steps[-1].step >= self.job.steps
            self._stop()
        if not (self.done or self.running) and all(machine.ready for machine in self.machines):
            self._begin()

    def _hear(self, machine: Machine) -> bool:
        """Whether a machine's worker has ended by itself."""
        ended = False
        for word, *rest in machine.words() if machine.agent else ():
            if word == "gone":
                raise RuntimeError(f"an agent ended; see {self.job.path / 'log'}")
            machine.ready = machine.ready or word == "ready"
            if word == "worker" and int(rest[0]) == self.life:
                machine.worker = int(rest[1])
                self._reaper.watch(machine.worker)
            ended = ended or (word == "exited" and int(rest[0]) == self.life)
        return ended

    def _begin(self) -> None:
        self.life += 1
        self.running = True
        address = f"{self.job.hosts[0]}:{free_port()}"
        for machine in self.machines:
            machine.tell(f"start {self.life} {address}")

    def _stop(self) -> None:
        self.running = False
        for machine in self.machines:
            if machine.ready:
                machine.tell("stop")
            if machine.worker is not None:
                self._reaper.forget(machine.worker)
                machine.worker = None

    def progress(self) -> list[StepDone]:
        """Every step that was finished, in order of time; a step taken again comes again."""
        return progress_of(self.job.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            if machine.agent is not None:
                self._end(machine)
        self._reaper.__exit__()
        self._log.close()


def progress_of(folder: Path) -> list[StepDone]:
    """Every step that a job finished, in order of time."""
    path = folder / "progress"
    lines = path.read_text().splitlines() if path.exists() else []
    fields = [line.split() for line in lines]
    return [StepDone(float(at_s), int(life), int(step)) for at_s, life, step in fields]


def best_interval_steps(stall_s: float, took_s: float, mtbf_s: float, step_s: float) -> int:
    """Steps between checkpoints that lose least: Young's sqrt(2 x stall x MTBF).

    Args:
        stall_s: what training waits for one.
        took_s: until it is complete; the next cannot begin before.
        mtbf_s: mean time between failures of the whole job.
        step_s: seconds a step.
    """
    return max(1, math.ceil(took_s / step_s), round(math.sqrt(2 * stall_s * mtbf_s) / step_s))


def main() -> None:
    """Train a little and print the pace, or be an agent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--gradient", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint-steps", type=int, default=5)
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent is not None:
        agent(args.agent, args.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            folder=folder,
            hosts=["127.0.0.1"] * args.processes,
            steps=args.steps,
            seed=0,
            step_s=args.step_s,
            gradient=args.gradient,
            checkpoint_steps=args.checkpoint_steps,
            task={"preset": args.preset},
        )
        with Scheduler(job) as scheduler:
            began_s = time.time()
            for rank in range(job.processes):
                scheduler.start(rank)
            while not scheduler.done:
                scheduler.look()
                time.sleep(POLL_S)
            steps = scheduler.progress()
        print((job.path / "log").read_text())
    took_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    print(f"first step after {steps[0].at_s - began_s:.1f} s, then {took_s:.3f} s a step")


if __name__ == "__main__":
    main()
