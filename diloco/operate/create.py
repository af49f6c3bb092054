"""`diloco run create`, `diloco.create`: streams, specification, layout, version 0 of a new run.

The *first parameters* are those of version 0. A creation that was interrupted is completed by
another call with the same settings and parameters.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco.aggregator.arrays.fragment import MOST_ELEMENTS
from diloco.aggregator.context import Context
from diloco.aggregator.genesis import commit_version_zero
from diloco.common.process import log
from diloco.common.process.config import (
    BusSection,
    Config,
    RunSettings,
    TaskSection,
    check_same_run,
    fitted,
    load_config,
    parse_settings,
)
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import run_to_end
from diloco.common.protocol import names, wire
from diloco.common.protocol.codecs import canonical
from diloco.common.protocol.errors import (
    ConfigError,
    RunMismatchError,
    RunMissingError,
    SwapLostError,
    TaskError,
)
from diloco.common.protocol.frozen import store_frozen
from diloco.common.protocol.layout import Hint, Layout, default_hint, layout_bytes, make_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import load_specification
from diloco.learner.load_and_check_task import run_task
from diloco.learner.task import Params, Task
from diloco.learner.tensors import tree
from diloco.learner.tensors.tree import loaded_frozen
from diloco.operate.make_streams import make_streams


def create(file: str | Path, params: Params, *, hint: Hint = default_hint) -> None:
    """Creates the run of a TOML file, which begins with these parameters.

    A run that exists already is completed. The file needs no `[task]`: learners join from custom
    training loops.

    Args:
        file: the run's TOML file.
        params: any pytree of arrays; leaves that are not floats are the run's constants.
        hint: (tensor's name, shape) -> how the aggregator merges that tensor.

    Raises:
        DilocoError: an error with advice.
    """
    config = load_config(Path(file))
    if "task" in config.model_fields_set:
        begin(config, params, hint)
    else:
        create_with(config, params, hint)


def create_from(config: Config, source: Path | None, *, tasked: bool = True) -> Layout:
    """Creates the run of `config` and returns its layout; one that exists already is completed.

    Args:
        config: the whole configuration.
        source: a safetensors file with the first parameters, or a folder in a format that the task
            reads. None: the parameters that the task's `init` makes, or its own folder has.
        tasked: whether the file names a task. Without one, the tensors of `source` are the model.

    Raises:
        DilocoError: an error with advice.
    """
    jetstream.check_url(config.bus.url)  # checked before a large model is initialized
    if source is not None and not (tasked and config.task.build):
        return create_with(config, _read_safetensors(source))
    settings = config.settings()
    task = run_task(settings)
    layout = tree.task_layout(task, settings.sync)
    if (folder := _folder(task, source)) is not None:
        assert task.files is not None
        loaded = loaded_frozen(task)
        leaves = {**task.files.read(folder), **loaded}
        run_to_end(_create(config, layout, _lazy_params(task, leaves), loaded))
        return layout
    loaded = loaded_frozen(task)
    params = _beginning(task, settings.run.seed, bare=bool(loaded) and source is None)
    if source is not None:
        params = load_safetensors(source, params)
    params = _lazy_params(task, {**tree.by_name(params), **loaded})
    run_to_end(_create(config, layout, params, loaded))
    return layout


def _beginning(task: Task, seed: int, *, bare: bool) -> Params:
    """Returns the parameters that the task's `init` makes; if `bare`, without frozen leaves."""

    def begin(key: jax.Array) -> Params:
        first = task.init(key)
        return first._replace(frozen=None) if bare else first

    return jax.jit(begin)(jax.random.key(seed))


def _folder(task: Task, source: Path | None) -> Path | None:
    """Returns the folder with the first parameters: `source`, or the task's; None if there is none.

    Raises:
        ConfigError: the task reads no folders.
    """
    if source is None:
        return None if task.files is None else task.files.first
    if not source.is_dir():
        return None
    if task.files is None:
        raise ConfigError(
            f"{str(source)!r} is a folder, but the run's task reads none",
            hint="give a safetensors file of its tensors; diloco.models.decoders:build reads"
            " Hugging Face folders",
        )
    return source


def _lazy_params(task: Task, leaves: Mapping[str, Any]) -> Params:
    """Returns the task's tree with these leaves by name; a leaf may be read when it is sliced."""
    return tree.from_names(task.shapes, dict(leaves))


def create_with(config: Config, params: Params, hint: Hint = default_hint) -> Layout:
    """Creates a run without a task, which begins with these parameters; returns its layout.

    Raises:
        DilocoError: an error with advice.
    """
    config = config.model_copy(update={"task": TaskSection(build="")})
    return begin(config, params, hint)


def begin(config: Config, params: Params, hint: Hint) -> Layout:
    """Creates the run of `config` with these parameters as version 0; returns its layout.

    `hint` says how the aggregator merges each tensor, as for `create`.
    """
    sync, tensors = config.sync, tree.tensors_of(params)
    layout = make_layout(tensors, fragments=sync.fragments, block=sync.block, hint=hint)
    tree.check_wide(layout)
    check_storable(layout)
    run_to_end(_create(config, layout, params))
    return layout


def check_storable(layout: Layout) -> None:
    """Refuses a layout with a fragment whose outer state is too large for an array of msgpack.

    Raises:
        ConfigError: a fragment is too large.
    """
    largest = max(fragment.size for fragment in layout.fragments)
    if largest > MOST_ELEMENTS:
        total = sum(fragment.size for fragment in layout.fragments)
        raise ConfigError(
            f"a fragment would have {largest:,} parameters; one has at most {MOST_ELEMENTS:,}",
            hint=f"raise sync.fragments from {len(layout.fragments)} to "
            f"{-(-total // MOST_ELEMENTS) + 1} or more",
        )


async def _create(
    config: Config, layout: Layout, params: Params, loaded: Collection[str] = ()
) -> None:
    bus = await jetstream.connect(
        config.bus.url,
        name=f"create-{config.run.name}",
        credentials=config.bus.credentials,
        tls_ca=config.bus.tls_ca,
    )
    try:
        store = open_store(config.store.url, emulator=config.store.emulator, create=True)
        await create_run(
            config.settings(), config.bus, layout, params, bus, store, Runtime(), loaded
        )
    finally:
        await bus.close()


async def create_run(
    settings: RunSettings,
    streams: BusSection,
    layout: Layout,
    params: Params,
    bus: Bus,
    store: ObjectStore,
    runtime: Runtime,
    loaded: Collection[str] = (),
) -> None:
    """Makes the streams, stores the layout and the leaves that are not synchronized ("held").

    It then publishes the specification and version 0.

    Args:
        settings: the settings that define the run.
        streams: the streams' replicas and limits.
        layout: the layout of `params`.
        params: the first parameters, the task's whole tree.
        bus: where the streams are made.
        store: where the objects are stored.
        runtime: clock and threads.
        loaded: names of leaves that each learner loads itself; they are not stored.

    Raises:
        RunMismatchError: the run exists with other settings or other first parameters.
        TaskError: the parameters are not finite.
    """
    settings, run = fitted(settings, layout), settings.run.name
    trained, held = tree.split(params, tree.synced_marks(params, layout))
    leaves = tree.by_name(trained)
    await runtime.call(_check_finite, layout, leaves)
    # Before the streams are made, since `resume` makes those of another epoch.
    await _check_unused(bus, store, runtime, run)
    await make_streams(bus, run, streams)
    await runtime.call(store.put, names.layout_object(run, layout.digest), layout_bytes(layout))
    specification = wire.Specification(
        run=run,
        epoch=0,
        positions={},
        layout=layout.digest,
        settings=settings.model_dump(),
        constants=await runtime.call(store_frozen, run, store.put, _arrays(held, loaded), loaded),
        created_at_s=runtime.clock(),
        positions_object=None,
    )
    try:
        await bus.publish(names.spec(run), wire.encode(specification), expected_last=0)
    except SwapLostError:
        existing = await load_specification(bus, run)
        theirs = parse_settings(existing.settings)
        check_same_run(settings, theirs, layout.digest, existing.layout)
    context = Context(
        settings=settings,
        layout=layout,
        epoch=0,
        bus=bus,
        store=store,
        runtime=runtime,
        logger=log.get(run=run),
        name="create",
    )
    await commit_version_zero(context, lambda index: _flatten(layout, index, leaves))


def _flatten(layout: Layout, fragment: int, leaves: Mapping[str, Any]) -> np.ndarray:
    """Returns a fragment's vector of the first parameters, float32 [size], valid as a view.

    It reads of each leaf only the rows that the fragment has.
    """
    described = layout.fragments[fragment]
    vector = np.zeros(described.size, np.float32)
    for piece in described.pieces:
        leaf = leaves[piece.tensor]
        rows = np.asarray(leaf[piece.start : piece.stop] if leaf.shape else leaf)
        segments = vector[piece.offset : piece.offset + piece.stride].reshape(piece.groups, -1)
        segments[:, : piece.group_size] = rows.reshape(piece.groups, piece.group_size)
    return canonical(vector)


def _check_finite(layout: Layout, leaves: Mapping[str, Any]) -> None:
    """Refuses first parameters that are infinite or NaN: no learner could send updates from them.

    Raises:
        TaskError: a value is not finite in float32.
    """
    bad: dict[str, None] = {}
    for fragment in layout.fragments:
        with np.errstate(over="ignore"):
            vector = _flatten(layout, fragment.index, leaves)
        for piece in fragment.pieces:
            if not np.isfinite(vector[piece.offset : piece.offset + piece.stride]).all():
                bad[piece.tensor] = None
    if not bad:
        return
    raise TaskError(
        f"the first parameters are infinite or not a number: {', '.join([*bad][:8])}",
        hint="nothing was created. Look at how they are made, or at the file that they are from",
    )


async def _check_unused(bus: Bus, store: ObjectStore, runtime: Runtime, run: str) -> None:
    """Refuses a store with objects of an earlier run of this name, if the bus has no tape of it.

    Raises:
        RunMismatchError: the new run's objects would collide with the old one's.
    """
    with contextlib.suppress(RunMissingError):
        await load_specification(bus, run)
        return
    prefixes = (names.checkpoint_prefix(run), names.learners_prefix(run))
    for prefix in prefixes:
        if await runtime.call(store.list, prefix):
            raise RunMismatchError(
                f"the store holds objects of a run {run!r}, but this bus has no tape of it",
                hint="resume it: diloco run resume; or choose another run name or store",
            )


def _arrays(held: Params, loaded: Collection[str]) -> dict[str, Any]:
    """Returns leaves by name, as arrays, except those that learners load: these are not read."""
    leaves = tree.by_name(held)
    return {n: leaf if n in loaded else np.asarray(leaf) for n, leaf in leaves.items()}


def load_safetensors(source: Path, like: Params) -> Params:
    """Returns parameters from a safetensors file, by name, cast to the dtypes of `like`.

    Raises:
        ConfigError: no such file, or names or shapes differ from those of `like`.
    """
    found = _read_safetensors(source)
    wanted = tree.by_name(like)
    wrong = sorted(set(wanted) ^ set(found))
    wrong += [n for n in wanted if n in found and found[n].shape != wanted[n].shape]
    if wrong:
        raise ConfigError(
            f"{source} does not hold the task's parameters; these are missing, unknown or of "
            f"another shape: {', '.join(wrong[:8])}",
            hint="its tensors must have the task's names and shapes",
        )
    return tree.from_names(like, {n: found[n].astype(leaf.dtype) for n, leaf in wanted.items()})


def _read_safetensors(source: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found: dict[str, Any] = load_file(source)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read {str(source)!r}: {error}", hint="--from takes a safetensors file"
        ) from error
    return found
