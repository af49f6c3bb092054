"""The learner as a library: takes part in a run with a custom training loop.

    with diloco.join("run.toml", learner="a", like=params) as island:
        params = island.params
        state = island.restore(optimizer.init(params))
        for batch in loader(island.position):
            params, state, loss = train_step(params, state, batch, island.global_step)
            params = island.step(params, loss=loss, save=state)
            if island.done:
                break

`diloco learner` is such a loop too (`train.py`), around a task. At each `step` the core
(`core/sync.py`) decides which versions to adopt and which updates to send, and `synchronizer.py`
carries the decisions out; this module is the loop's interface to both.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco.common.process import log
from diloco.common.process.accelerators import find_accelerators, unused
from diloco.common.process.config import Config, allows_accelerators, load_config
from diloco.common.process.probes import Probes, make_probes, serving
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import AskedToStopError, asked_by_signals
from diloco.common.process.tasks import running_loop
from diloco.common.protocol import names
from diloco.common.protocol.errors import (
    ConfigError,
    DilocoError,
    HostLostError,
    ParametersError,
    status_of,
)
from diloco.common.protocol.layout import Hint
from diloco.learner.background import Background
from diloco.learner.core.handover import Boundary
from diloco.learner.following_host import follow
from diloco.learner.hosts.messages import HANGING_S, end_if_hanging
from diloco.learner.leading_host import lead
from diloco.learner.life import Host, Life
from diloco.learner.member import NAMED, Member
from diloco.learner.synchronizer import figures_of, loss_of, never
from diloco.learner.task import Batch, Holder, Params, Shared
from diloco.learner.tensors import tree
from diloco.learner.tensors.placement import put_like

# Prefix of figures of held-out data among a learner's metrics.
HELD_OUT = "held_out_"
# Seconds after a broken collective within which the loss of a host is reported.
SAID_S = 5.0
# States of a boundary after which further steps follow.
GOING_ON = ("training", "paused")


class Unbroken:
    """A block that raises for good once an exception, such as a Ctrl-C, has left it.

    Half of a step may have been taken then: a version adopted whose parameters the loop never got,
    or an update sent that nobody uploads.
    """

    broken = False

    def __enter__(self) -> None:
        if self.broken:
            raise DilocoError(
                "an earlier step was broken off, by an error or by Ctrl-C: what it adopted and sent"
                " is not in these parameters",
                hint="leave the run and join again; a Ctrl-C between two steps does no harm",
            )
        self.broken = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.broken = kind is not None


class Learner:
    """A training loop's membership in a run, made by `join`; to be used by one thread.

    Attributes:
        done: the loop is to end: the run has stopped, this learner was asked to leave, or the
            block of `join` is over. On several hosts `done` becomes true at the same step.
        why: once it has left the run: why; before, "".
        global_step: the run's clock for the next step; learning rates are to follow it.
    """

    def __init__(self, life: Life, asked: threading.Event) -> None:
        self.done = False
        self.why = ""
        self.global_step = life.synchronizer.boundaries.first_step()
        self._life = life
        self._asked = asked
        self._synchronizer = life.synchronizer
        self._params = life.params
        self._synced = tree.synced_marks(life.params, life.context.layout)
        self._shapes = _shapes(life.params)
        self._known = _kinds(life.params)
        self._held = not all(self._synced)
        self._loss: Any = None
        self._metrics: Mapping[str, Any] = {}
        self._save: Any = None
        self._saves = False
        self._then = "step"
        self._unbroken = Unbroken()
        self._began_s = time.perf_counter()

    @property
    def params(self) -> Params:
        """The parameters: first the run's newest version, then what the last `step` returned."""
        return self._params

    @property
    def position(self) -> int:
        """The number of this learner's batches that are done; the loop's data resumes there."""
        return self._synchronizer.position

    def viewed(self) -> Iterator[dict[str, Any]]:
        """Yields the global parameters that were adopted last, one fragment at a time.

        Each item has the fragment's leaves, by name. Rows of a leaf that belong to another fragment
        have the values of `params`. All hosts of a learner must call this together.
        """
        return self._synchronizer.replica.viewed()

    def settle(self, params: Params) -> None:
        """Replaces the learner's parameters by arrays of equal values, and frees the old arrays."""
        self._params = params
        self._synchronizer.replica.trained = self._trained()

    def restore(self, state: Any) -> Any:
        """Returns the state that was last passed to `step` as `save` and is in a checkpoint.

        Args:
            state: a tree of the same structure, of arrays or shapes. Returned itself if there is no
                checkpoint.

        Returns:
            The state, each leaf on the devices of the leaf of `state`. If this learner held other
            modules when the checkpoint was made, leaves that it lacks are those of `state`.

        Raises:
            DilocoError: training has begun already.
        """
        meter = self._synchronizer.meter
        if meter.local_step:
            raise DilocoError(
                "`restore` came after the first step, or twice",
                hint="restore once, before the loop begins",
            )
        leaves = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "dtype") else np.asarray(leaf), state
        )
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), leaves)
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), leaves)
        found = self._life.find(like, shardings)
        if found is None:
            return state
        meter.local_step, meter.earlier_tokens = found.local_step, found.tokens
        self._saves = True
        return jax.tree.map(_restored, found.state, leaves)

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields `batches`, and counts the time for which the loop waits for each batch.

        Heartbeats report that time as waiting for data.
        """
        asked_s = time.perf_counter()
        for batch in batches:
            self._synchronizer.meter.data_s += time.perf_counter() - asked_s
            yield batch
            asked_s = time.perf_counter()

    def divide(self, data: Shared) -> Holder:
        """Begins to claim shares of the data's epochs on the run's tape.

        Returns:
            The argument `holder` of `data.claimed`.

        Raises:
            DilocoError: this learner claims shares already.
        """
        self._life.shares.divide(data.sizes)
        return self._life.shares

    def claimed(self, data: Shared) -> Iterator[Batch]:
        """Claims shares of the data, and yields their batches, from batch `position` on.

        The time for which the loop waits for a batch counts as waiting for data. The iterator ends
        if the loop is to end while it waits for a share.

        Raises:
            DilocoError: this learner claims shares already.
        """
        return self.reading(data.claimed(self.divide(data), self.position))

    def step(
        self,
        params: Params,
        *,
        loss: Any,
        metrics: Mapping[str, Any] | None = None,
        save: Any = None,
    ) -> Params:
        """Takes a step boundary: adopts versions that have arrived, sends updates that are due.

        Does not wait, except for versions in lockstep mode, and while an operator has paused the
        run.

        Args:
            params: the parameters after the loop's step; the caller must not use them again.
            loss: loss of that step, a scalar that may still be computing: it is read a step later.
            metrics: further scalars of that step by name, read as the loss is; heartbeats carry
                their moving averages.
            save: contents of a checkpoint, such as the optimizer's state: a tree of arrays, copied
                when a checkpoint is due; or a function that returns the tree then. With
                `learner.snapshot_steps` any step may be the last of a checkpoint, so that a loop
                which gives it once must give it at each step.

        Returns:
            The parameters to continue with.

        Raises:
            DivergedError: the loss is infinite or not a number.
            ParametersError: names, dtypes or shapes of the parameters have changed.
            DilocoError: an error that ends this learner; or the loop continued after `done`, or
                after a step that was interrupted; or `save` was given before, and a snapshot is due
                without it.
        """
        if self.done:
            raise DilocoError(
                "a step came after `done`: nothing of it would be sent",
                hint="end the loop once `done` is true",
            )
        self._params, self._save = params, save
        self._synchronizer.position += 1
        self._synchronizer.meter.global_step = self.global_step
        read, self._loss = self._read_loss(), loss
        self._synchronizer.losses.stepped(read, loss)
        self._synchronizer.meter.measured(self._metrics)
        self._metrics = metrics or {}
        with self._unbroken:
            boundary = self._turn()
            meter = self._synchronizer.meter
            took_s = time.perf_counter() - self._began_s
            meter.stepped(took_s, self._synchronizer.tokens_per_step, read)
            self._saves = self._saves or save is not None
            if boundary.checkpoint and (save is not None or boundary.unsent):
                self._check_saved()
                self._checkpoint(boundary)
                self._save = None
            meter.state = boundary.state
            while boundary.then == "hold" and boundary.state in GOING_ON:
                boundary = self._turn()
                meter.state = boundary.state
            self.global_step, self._then = boundary.global_step, boundary.then
            self.done = boundary.state not in GOING_ON or boundary.then == "end"
            self._began_s = time.perf_counter()
        return self._params

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Reports figures that the loop measured on held-out data, by name, in the heartbeats.

        Raises:
            DilocoError: a name is invalid, a figure is not a number, or there are too many.
        """
        named = {HELD_OUT + name: value for name, value in figures_of(figures).items()}
        self._synchronizer.meter.show(named)

    def leave(self) -> None:
        """Asks this learner, on all its hosts, to leave: `done` becomes true at a later step.

        May be called from any thread.
        """
        self._asked.set()

    def finish(self) -> None:
        """Sends unsent work, for at most `learner.drain_timeout_s`, and leaves the run."""
        synchronizer = self._synchronizer
        self._read_loss()
        if not self.done:
            self._life.give_up()
            self._asked.set()
            if self._save is not None and not _is_gone(self._save):
                self._checkpoint(Boundary((), "hold", self.global_step))
        # Parameters that were donated to a step which never returned cannot be sent, and what an
        # interrupted step has adopted or sent is not known.
        while self._then != "end" and not (_is_gone(self._params) or self._unbroken.broken):
            boundary = self._turn()
            synchronizer.meter.state, self._then = boundary.state, boundary.then
        self.why = self._life.leave()

    def _check_saved(self) -> None:
        """Checks that a checkpoint has the loop's state, if checkpoints before have.

        Raises:
            DilocoError: it would take the place of one with that state.
        """
        if self._saves and self._save is None:
            raise DilocoError(
                "the loop gave `save` before, and none at a step at which a snapshot is due: the"
                " snapshot would have no optimizer",
                hint="with learner.snapshot_steps give `save` at each step, such as a function that"
                " returns the state; or set snapshot_steps = 0",
            )

    def _checkpoint(self, boundary: Boundary) -> None:
        """Makes a checkpoint of the loop's last `save`, if this learner keeps checkpoints."""
        state = self._save() if callable(self._save) else self._save
        if boundary.unsent:
            self._synchronizer.replica.trained = self._trained()
        self._synchronizer.checkpoint(state, boundary)

    def _turn(self) -> Boundary:
        synchronizer = self._synchronizer
        boundary = synchronizer.turn(self._trained)
        if boundary.effects:
            trained = synchronizer.replica.trained
            if self._held:
                _, held = tree.split(self._params, self._synced)
                trained = tree.join(trained, held)
            self._params = trained
        return boundary

    def _trained(self) -> Params:
        """Returns the loop's synchronized leaves, after checking that all leaves fit the run.

        Raises:
            ParametersError: names, dtypes or shapes changed.
        """
        if self._known is None or _kinds(self._params) != self._known:
            self._compare()
        return tree.split(self._params, self._synced)[0] if self._held else self._params

    def _compare(self) -> None:
        """Compares the parameters with those that joined: names, dtypes and shapes of the leaves.

        The types of the trees' containers may differ.

        Raises:
            ParametersError: the parameters differ.
        """
        found = _shapes(self._params)
        if found != self._shapes:
            both = dict.fromkeys([*self._shapes, *found])
            differ = [name for name in both if found.get(name) != self._shapes.get(name)]
            raise ParametersError(
                "the loop gave `step` parameters that differ from `params`: "
                + "; ".join(
                    f"{name}: {found.get(name, 'none')} given, {self._shapes.get(name, 'none')} "
                    "expected"
                    for name in differ[:NAMED]
                ),
                hint="give back the whole tree that `params` and `step` gave, in the same shapes "
                "and dtypes",
            )

    def _read_loss(self) -> float | None:
        """Returns the loss of the step before; None before the first step."""
        if self._loss is None:
            return None
        return loss_of(self._loss)


def _restored(value: Any, given: Any) -> Any:
    return given if isinstance(value, jax.ShapeDtypeStruct) else put_like(value, given)


def _shapes(params: Params) -> dict[str, str]:
    """Returns the dtype and shape of each leaf, as text."""
    leaves = (
        (name, getattr(leaf, "dtype", None), leaf) for name, leaf in tree.named_leaves(params)
    )
    return {name: f"{dtype or 'no array'}{list(np.shape(leaf))}" for name, dtype, leaf in leaves}


def _kinds(params: Params) -> Any:
    """Returns structure, dtypes and shapes of a tree of arrays; None if not a tree of arrays."""
    try:
        leaves, structure = jax.tree.flatten(params)
        return structure, [(leaf.dtype, leaf.shape) for leaf in leaves]
    except (AttributeError, ValueError, TypeError, SystemError, RecursionError):
        return None


def _is_gone(values: Any) -> bool:
    """True if an array of the tree `values` was donated to a program, so that it has no values."""
    return any(
        isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(values)
    )


@contextlib.contextmanager
def join(
    file: str | Path,
    *,
    learner: str,
    like: Params,
    hint: Hint | None = None,
    tokens_per_step: int | None = None,
    warm_up: Callable[[Params], object] | None = None,
    holds: Collection[str] | None = None,
) -> Iterator[Learner]:
    """Joins a run, for as long as the block lasts.

    At its end the block sends unsent work, for at most `learner.drain_timeout_s`; also after a
    KeyboardInterrupt, which is then raised again, unless it came within `step`. After any other
    exception nothing is sent: the loop's work since its last update is lost, as after a crash.

    The first SIGINT or SIGTERM sets `done`; a second one is handled as before the block. (Signals
    are handled on the main thread only.)

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        like: the loop's parameters, of which names, shapes, dtypes and shardings matter, not the
            values: any pytree of JAX arrays, NumPy arrays or shapes. Leaves that are not floats are
            the run's constants.
        hint: the hint with which the run was created, as in `Task`; None: tensors are merged as the
            run's layout says.
        tokens_per_step: tokens of one step, of all hosts together; None: `run.tokens_per_step` of
            the run's file.
        warm_up: is called with copies of the parameters before this learner joins the run: compile
            the training step there, on arrays that it may donate.
        holds: the modules (`TensorHint.module`) that this learner holds; None: all. `like` has the
            leaves of all modules all the same; `params` has None for those of the others.

    Yields:
        The loop's `Learner`.

    Raises:
        KeyboardInterrupt: a signal came while the learner waited for NATS or the store.
        DilocoError: an error that a retry cannot mend; its hint says what to do.
    """
    config = load_config(Path(file))
    member = member_of(config, learner, like, hint, tokens_per_step, warm_up)
    if holds is not None:
        member = replace(member, holds=_held(learner, holds))
    asked, runtime = threading.Event(), Runtime()
    probes = make_probes(runtime.retries, run=config.run.name, learner=learner)
    joining = joined(config, member, asked, runtime, probes)
    try:
        with (
            log.within_anothers_program(),
            asked_by_signals(asked.set),
            serving(config.metrics, probes),
            joining as island,
        ):
            yield island
    except AskedToStopError as error:  # while it waited for NATS or the store
        raise KeyboardInterrupt from error


@contextlib.contextmanager
def joined(
    config: Config, member: Member, asked: threading.Event, runtime: Runtime, probes: Probes
) -> Iterator[Learner]:
    """Joins a run as `join` does, for a caller that handles signals and serves probes itself.

    Args:
        config: the learner's configuration.
        member: the facts about the training loop.
        asked: is set when the learner is asked to leave.
        runtime: clock, retries and threads.
        probes: health and metrics, which the caller serves.
    """
    warn_of_unused_accelerators(config.run.name, member)
    with alive(config, member, asked, runtime, probes) as life:
        life.begin()
        island = Learner(life, asked)
        try:
            yield island
            island.finish()
        except KeyboardInterrupt:
            island.finish()
            raise
        finally:
            island.done = True


@contextlib.contextmanager
def alive(
    config: Config, member: Member, asked: threading.Event, runtime: Runtime, probes: Probes
) -> Iterator[Life]:
    """Prepares a learner up to its first step; yields the `Life`. Arguments are as in `joined`.

    Starts the event loop and its tasks beside training, and ends them when the block ends.
    """
    hanging = _Hanging(config.learner.drain_timeout_s)
    with contextlib.closing(hanging), running_loop() as loop:
        host = Host(
            config=config,
            settings=config.settings(),
            member=member,
            runtime=runtime,
            probes=probes,
            background=Background(loop),
            asked_to_leave=asked.is_set,
            gives_up=asked.is_set if jax.process_index() == 0 else never,
            lost_host=hanging.begin,
            naming_lost=hanging.named,
        )
        with lead(host) if jax.process_index() == 0 else follow(host) as life:
            yield life


def member_of(
    config: Config,
    learner: str,
    like: Params,
    hint: Hint | None,
    tokens_per_step: int | None,
    warm_up: Callable[[Params], object] | None,
) -> Member:
    """Returns the loop's `Member`. Arguments and errors are those of `join`."""
    check_name(learner)
    return Member.of(
        like,
        learner=learner,
        anchor=config.learner.island(learner).anchor or config.sync.anchor,
        tokens_per_step=_tokens_per_step(config, learner, tokens_per_step),
        hint=hint,
        warm_up=None if warm_up is None else lambda copies: warm_up(copies()),
    )


def _held(learner: str, holds: Collection[str]) -> tuple[str, ...]:
    """Returns the argument `holds` of `join` as a tuple.

    Raises:
        ConfigError: it is no collection of names, is empty, or the learner has several hosts.
    """
    if isinstance(holds, str) or not holds:
        raise ConfigError(
            f"`holds` of the learner {learner!r} must be names of modules, but it is {holds!r:.80}",
            hint='give a list, such as ["trunk", "expert-0"]; or leave it out, to hold all modules',
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"{learner!r} has several hosts, and its loop holds some modules alone",
            hint="leave `holds` out: a learner of several hosts holds all modules",
        )
    return tuple(holds)


class _Hanging:
    """Ends this process if it hangs in a collective with a host that is gone.

    Args:
        within_s: seconds that the process has to end by itself; at most `HANGING_S` count.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = min(within_s, HANGING_S)
        self._timers: list[threading.Timer] = []
        self._gone: BaseException | None = None
        self._told = threading.Event()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Replaces the error of a broken collective in the block by the error that names its cause.

        The cause is the error given to `begin`, if `begin` is called within `SAID_S` seconds;
        otherwise the collective's own error is raised.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            # The collective breaks before the loss is reported.
            if jax.process_count() > 1:
                self._told.wait(min(self._within_s, SAID_S))
            if self._gone is None:
                raise
            raise self._gone from error

    def begin(self, error: BaseException) -> None:
        """Starts the timer that ends this process; `error` says that a host is gone."""
        self._gone = self._gone or error
        self._told.set()
        # JAX aborts a process whose host 0 is gone, within a second, with its traces.
        at_once = isinstance(error, HostLostError) and jax.process_index() > 0
        within_s = 0.0 if at_once else self._within_s
        self._timers.append(end_if_hanging(status_of(error), within_s=within_s, why=error))

    def close(self) -> None:
        """Stops the timers, since the loop has ended."""
        for timer in self._timers:
            timer.cancel()


def check_name(learner: str) -> None:
    """Checks that a text is a valid name of a learner.

    Raises:
        ConfigError: the text is not a valid name.
    """
    if not names.valid_name(learner):
        raise ConfigError(
            f"{learner!r} is not a valid learner name",
            hint="use lower-case letters, digits and '-', at most 40, a letter or digit first",
        )


def _tokens_per_step(config: Config, learner: str, given: int | None) -> int:
    """Returns the tokens of one step of this learner, by the run's file or by its loop (`given`).

    Raises:
        ConfigError: neither gives a number, or the two disagree.
    """
    said = config.run.tokens_of(learner)
    if said and given not in (None, said):
        raise ConfigError(
            f"the loop of {learner!r} says {given} tokens a step, the run's file {said}",
            hint="leave it out: run.tokens_per_step says it for all",
        )
    tokens = said or given
    if not tokens:
        raise ConfigError(
            f"the run's file does not say how many tokens a step of {learner!r} covers",
            hint="set run.tokens_per_step: of a batch, of all hosts together",
        )
    return tokens


# --- A learner on the CPU of a machine that has accelerators


def warn_of_unused_accelerators(run: str, member: Member) -> None:
    """Logs a warning if JAX uses the CPU of a machine with accelerators, and nobody asked it to."""
    in_jax = any(sharding is not None for sharding in member.shardings.values())
    if not in_jax or wants_cpu() or jax.default_backend() != "cpu":
        return
    found = find_accelerators()
    if found is not None:
        logger = log.get(run=run, learner=member.learner)
        logger.warning(
            "accelerator_unused", found=found.count(len(found.names)), advice=unused(found)
        )


def wants_cpu() -> bool:
    """True if the environment or the program limits JAX to the CPU."""
    return getattr(jax.config, "jax_platforms", None) == "cpu" or not allows_accelerators()
