"""A forecast of a learner's memory and traffic, without its hardware: `diloco learner --dry-run`.

The programs that the learner would run are lowered and compiled from shapes alone, for its mesh:
the inner step, and the programs that send and adopt a fragment. No parameter is allocated, so that
a model which fills a slice can be examined on a laptop, whose CPU replaces the slice's devices.

Bytes of arrays are exact for any hardware, since they follow from the sharding; only the padding of
a TPU's tiles is not counted. The programs' other figures (activations, temporaries, exchanges
between devices) are those of the compiler at hand; another platform's compiler fuses differently.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from diloco.common.process.config import Config, LearnerSection, SyncSection, sync_of
from diloco.common.protocol import shards, slices
from diloco.common.protocol.codecs import Codec, Encoded, code_count, code_dtype, scale_count
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Fragment
from diloco.learner.collectives import exchanges, received_by_kind
from diloco.learner.island import Island
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import single
from diloco.learner.tensors.placement import make_ownership
from diloco.learner.tensors.send_and_adopt import anchor_memory
from diloco.learner.tensors.send_and_adopt_kernels import (
    Blocks,
    Codes,
    Kernels,
    Leaves,
    make_kernels,
)
from diloco.learner.tensors.utilization import memory_bytes

# What a mixture of experts can do that needs more memory than a device has.
SPREAD_EXPERTS = (
    "each device gathers all experts of a layer: a mesh with an axis `expert`, such as expert=4,"
    " leaves it a part of them"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """The memory that a learner needs, in bytes of one device; `host_anchor` is of one host.

    Attributes:
        parameters: all parameters.
        optimizer: the inner optimizer's state.
        anchor: the adopted views of all fragments, and with `adopt = "blend"` as much again for
            updates in flight; 0 if views are kept in the host's memory.
        host_anchor: the same views in the memory of one host; 0 if they are kept on the devices.
        in_flight: codes of one update of every fragment, the most that can be in flight.
        batch: a batch, and the numbers that the step is called with.
        activations: all other memory of the inner step, as the compiler counts it.
        synchronization: an upper bound on results and temporaries of a send or an adoption, for the
            fragment that needs most, as the compiler counts them.
        checkpoint: copies of which a checkpoint is made while training goes on; 0 without
            `checkpoint_dir`.
    """

    parameters: int
    optimizer: int
    anchor: int
    host_anchor: int
    in_flight: int
    batch: int
    activations: int
    synchronization: int
    checkpoint: int

    @property
    def training(self) -> int:
        """Bytes of a device during training."""
        kept = self.parameters + self.optimizer + self.anchor + self.in_flight + self.batch
        return kept + self.activations + self.synchronization + self.checkpoint

    @property
    def start(self) -> int:
        """Bytes of a device at the start, when the programs run on a copy of the parameters."""
        kept = 2 * self.parameters + self.optimizer + self.anchor + self.batch
        return kept + self.activations


class ProgramCost(NamedTuple):
    """The memory traffic and memory of programs that run in order, on one device.

    Attributes:
        moved_bytes: lower bound on the bytes of memory that are read and written.
        extra_bytes: bytes of temporaries, and of results that reuse no argument's memory.
        exchanged_bytes: bytes received from other devices.
        largest_bytes: the most bytes that a single collective operation receives.
        accessed_bytes: the compiler's sum over operations of the bytes that each reads and writes.
    """

    moved_bytes: int
    extra_bytes: int
    exchanged_bytes: int
    largest_bytes: int
    accessed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentFigures:
    """The figures of one fragment.

    Attributes:
        index: the fragment's index.
        elements: the number of its parameters.
        send: the cost on one device of encoding an update.
        adopt: the cost on one device of adopting a version.
    """

    index: int
    elements: int
    send: ProgramCost
    adopt: ProgramCost


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTraffic:
    """The traffic of one host with the object store, for one round of every fragment.

    Attributes:
        host: the host's number.
        bytes_up: bytes of the shards that the host stores.
        bytes_down: bytes of version deltas that the host reads.
        objects_up: the number of shards that the host stores.
    """

    host: int
    bytes_up: int
    bytes_down: int
    objects_up: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The figures of a dry run.

    Attributes:
        learner: the learner's name.
        platform: the platform of the compiler, such as "cpu" or "tpu".
        device_bytes: memory of a device in bytes; None: unknown.
        devices: the number of devices of all hosts together.
        hosts: the number of hosts.
        mesh: the size of each axis of the mesh, by its name.
        holds: the modules that the learner holds; empty: all. Only these are counted.
        parameters: the number of synchronized parameters.
        active_parameters: the number of parameters that one token uses; None: all.
        frozen_parameters: the number of parameters that are not trained.
        step_exchanged: bytes that one device receives from others in an inner step, by the kind of
            collective operation.
        tokens_per_batch: the tokens of one batch.
        interval_steps: H, the inner steps between two updates of a fragment.
        overlap_steps: tau, the inner steps that may pass from an update to its version.
        memory: the memory that the learner needs.
        fragments: the figures of each fragment.
        traffic: the traffic of each host.
    """

    learner: str
    platform: str
    device_bytes: int | None
    devices: int
    hosts: int
    mesh: dict[str, int]
    holds: tuple[str, ...]
    parameters: int
    active_parameters: int | None
    frozen_parameters: int
    step_exchanged: dict[str, int]
    tokens_per_batch: int
    interval_steps: int
    overlap_steps: int
    memory: MemoryNeed
    fragments: tuple[FragmentFigures, ...]
    traffic: tuple[HostTraffic, ...]


def stand_in(section: LearnerSection) -> LearnerSection:
    """Returns the section without compiler options, which only the real hardware's compiler has."""
    islands = {
        name: island.model_copy(update={"compiler_options": {}})
        for name, island in section.islands.items()
    }
    return section.model_copy(update={"compiler_options": {}, "islands": islands})


def dry_run(
    config: Config, learner: str, *, hosts: int = 1, devices: list[Any] | None = None
) -> DryRun:
    """Compiles a learner's programs; returns the memory and traffic that they need.

    Args:
        config: the learner's configuration.
        learner: its name.
        hosts: the number of the learner's hosts; each has an equal part of the devices, in order.
        devices: the devices of all the hosts; all that JAX has, if None.

    Raises:
        ConfigError: the devices cannot be divided equally among hosts, or have too little memory.
        DilocoError: the task breaks a rule, or does not fit the mesh.
    """
    island = Island(config, learner, devices)
    count = island.mesh.devices.size
    if count % hosts:
        raise ConfigError(
            f"{count} devices cannot be divided among {hosts} hosts",
            hint="each host of a learner has as many devices as the others",
        )
    with island.context():
        fragments = fragment_shapes(island)
        figures = measured(fragments)
        step = compile_step(island)
        return DryRun(
            learner=learner,
            platform=island.mesh.devices.flat[0].platform,
            device_bytes=memory_bytes(island.mesh.devices.flat[0].device_kind),
            devices=count,
            hosts=hosts,
            mesh=dict(island.mesh.shape),
            holds=island.holds,
            parameters=sum(each.elements for each in island.fragments),
            active_parameters=island.task.active_parameters,
            frozen_parameters=_frozen(island),
            step_exchanged=received_by_kind(exchanges(step.as_text() or "")),
            tokens_per_batch=island.task.tokens_per_batch,
            interval_steps=island.settings.sync.interval_steps,
            overlap_steps=island.settings.sync.overlap_steps,
            memory=_memory(island, config.learner, step, fragments, figures, count // hosts),
            fragments=figures,
            traffic=_traffic(island, fragments, hosts),
        )


def _frozen(island: Island) -> int:
    kinds = zip(island.division.synced, island.division.own, strict=True)
    leaves = zip(jax.tree.leaves(island.shapes), kinds, strict=True)
    return sum(math.prod(leaf.shape) for leaf, moves in leaves if not any(moves))


def compile_step(island: Island) -> jax.stages.Compiled:
    """Returns the learner's inner step, compiled from shapes without allocating parameters.

    Raises:
        ConfigError: the compiler says that a device has too little memory.
    """
    # The key, and the one that shapes follow from, are computed here; the island may be elsewhere.
    with jax.set_mesh(single()):
        step: Any = island.inner_step()
        numbers = np.int32(0), np.uint32(0), island.key()
    arguments = island.sharded_params(), island.sharded_state(), island.sharded_batch()
    lowered = step.lower(*arguments, *numbers)
    try:
        compiled: jax.stages.Compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        hint = "a mesh with a larger fsdp, a smaller batch, or accumulate"
        if island.task.active_parameters is not None and island.mesh.shape["expert"] == 1:
            hint = f"{SPREAD_EXPERTS}; or {hint}"
        raise ConfigError(
            f"a step of {island.learner} needs more memory than a device has: "
            f"{str(error).splitlines()[0]}",
            hint=hint,
        ) from error
    return compiled


def _memory(
    island: Island,
    section: LearnerSection,
    compiled: jax.stages.Compiled,
    fragments: "Sequence[FragmentShapes]",
    figures: Iterable[FragmentFigures],
    per_host: int,
) -> MemoryNeed:
    step = _analysis(compiled)
    parameters = device_bytes(island.sharded_params())
    optimizer = device_bytes(island.sharded_state())
    views = sum((2 if each.blends else 1) * device_bytes(each.view) for each in fragments)
    on_device = anchor_memory(island.anchor) is None
    # A view that is kept on the host is fetched for the duration of the operation.
    fetched = 0 if on_device else max(device_bytes(each.view) for each in fragments)
    return MemoryNeed(
        parameters=parameters,
        optimizer=optimizer,
        anchor=views if on_device else 0,
        host_anchor=0 if on_device else views * per_host,
        in_flight=sum(device_bytes(each.update) for each in fragments),
        batch=step.argument_size_in_bytes - parameters - optimizer,
        activations=step.temp_size_in_bytes,
        synchronization=fetched
        + max(max(one.send.extra_bytes, one.adopt.extra_bytes) for one in figures),
        checkpoint=checkpoint_copies(section, optimizer, fragments),
    )


def checkpoint_copies(
    section: LearnerSection, optimizer: int, fragments: "Iterable[FragmentShapes]"
) -> int:
    """Returns the bytes that the copies for a checkpoint take at most on one device.

    Args:
        section: the learner's settings.
        optimizer: bytes of the inner optimizer's state on one device.
        fragments: all fragments.
    """
    if section.checkpoint_dir is None:
        return 0
    if not section.snapshot_steps:
        return optimizer
    leaves = {name: leaf for each in fragments for name, leaf in each.leaves.items()}
    flying = device_bytes(leaves)
    ahead = device_bytes(
        [
            jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding)
            for leaf in leaves.values()
        ]
    )
    # The two values of the unsent work stay until they are on the host. While they are computed,
    # parameters and views have a copy each; the state is copied afterwards.
    return ahead + flying + max(optimizer, 2 * flying)


# --- Fragments


class FragmentShapes:
    """The operations that send and adopt a fragment, and the shapes of their arguments.

    All shapes have shardings.

    Args:
        island: the learner's task and mesh.
        fragment: the fragment.
        leaves: shapes of all leaves of the parameters, by name.

    Attributes:
        sync: the run's sync section, with the settings for this fragment.
        fragment: the fragment.
        kernels: the operations.
        leaves: shapes of the leaves that have rows in the fragment, by name.
        view: shapes of the fragment's view, for each piece.
        update: shapes of an update's codes and scales, for each piece.
        delta: shapes of a version delta's codes and scales, for each piece.
    """

    def __init__(self, island: Island, fragment: Fragment, leaves: Leaves) -> None:
        self.sync = sync_of(island.settings.sync, fragment)
        self.fragment = fragment
        self.kernels = make_kernels(
            island.layout,
            fragment.index,
            codec=self.sync.codec,
            delta_codec=self.sync.delta_codec,
            shardings=tree.by_name(island.shardings),
        )
        self.leaves = {name: leaves[name] for name in self.kernels.names}
        block = (self.kernels.block,)
        self.view = self._placed(block, np.dtype(np.float32))
        self.update = self._codes(self.kernels.codec)
        self.delta = self._codes(self.kernels.delta_codec)

    def _placed(self, items: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return tuple(
            jax.ShapeDtypeStruct((*placed.grid, *items), dtype, sharding=placed.sharding)
            for placed in self.kernels.placed
        )

    def _codes(self, codec: Codec) -> Any:
        block = self.kernels.block
        items = (code_count(codec, block),)
        codes = self._placed(items, code_dtype(codec))
        if not scale_count(codec, block, block):
            empty = jax.ShapeDtypeStruct((0,), code_dtype("bfloat16"))
            return tuple(Encoded(empty, each) for each in codes)
        scales = self._placed((), code_dtype("bfloat16"))
        return tuple(map(Encoded, scales, codes))

    def measure(self) -> tuple[ProgramCost, ProgramCost]:
        """Returns (cost of a send, cost of an adoption that also resolves an update)."""
        send, adopt = _sending(self.kernels, self.blends), _adoption(self.kernels, self.sync)
        brought = (self.view, self.delta, self.update) + ((self.view,) if self.blends else ())
        rows = self.rows_bytes()
        return (
            cost(programs(send, self.leaves, self.view, touched=rows)),
            cost(programs(adopt, self.leaves, *brought, touched=rows)),
        )

    @property
    def blends(self) -> bool:
        """True if `adopt` is "blend": a send then also computes theta - V, for the adoption."""
        return self.sync.adopt == "blend"

    def rows_bytes(self) -> dict[str, int]:
        """Returns, by tensor, the bytes on one device of those rows that are in the fragment."""
        found = dict.fromkeys(self.kernels.names, 0)
        for piece in self.fragment.pieces:
            leaf = self.leaves[piece.tensor]
            rows = jax.ShapeDtypeStruct(piece.shape, leaf.dtype, sharding=leaf.sharding)
            found[piece.tensor] += device_bytes(rows)
        return found


def fragment_shapes(island: Island) -> list[FragmentShapes]:
    """Returns the shapes of all held fragments; call it within the island's context."""
    leaves = tree.by_name(island.sharded_params())
    return [FragmentShapes(island, each, leaves) for each in island.fragments]


def measured(fragments: Sequence[FragmentShapes]) -> tuple[FragmentFigures, ...]:
    """Compiles the operations of each fragment, and returns the figures, in the given order.

    Fragments of equal shapes are compiled once.
    """
    found: dict[Any, tuple[ProgramCost, ProgramCost]] = {}
    for each in fragments:
        if each.kernels.geometry not in found:
            found[each.kernels.geometry] = each.measure()
    return tuple(
        FragmentFigures(
            index=each.fragment.index,
            elements=each.fragment.elements,
            send=found[each.kernels.geometry][0],
            adopt=found[each.kernels.geometry][1],
        )
        for each in fragments
    )


def _sending(kernels: Kernels, blends: bool) -> Callable[[Leaves, Blocks], Any]:
    """Returns the function that `Replica.send` runs on the devices."""
    if not blends:
        return kernels.send
    return lambda leaves, view: (kernels.send(leaves, view), kernels.ahead(leaves, view))


def _adoption(kernels: Kernels, sync: SyncSection) -> Callable[..., tuple[Leaves, Blocks]]:
    """Returns the function that `Replica.adopt` runs for a version that resolves an update."""

    def rebase(leaves: Leaves, view: Blocks, delta: Codes, update: Codes) -> tuple[Leaves, Blocks]:
        leaves, view = kernels.apply(leaves, view, delta)
        return kernels.settle(leaves, update), view

    def overwrite(
        leaves: Leaves, view: Blocks, delta: Codes, _update: Codes
    ) -> tuple[Leaves, Blocks]:
        view = kernels.advance(view, delta)
        if sync.alpha:
            return kernels.mix(leaves, view, sync.alpha), view
        return kernels.overwrite(leaves, view), view

    def blend(
        leaves: Leaves, view: Blocks, delta: Codes, update: Codes, sent: Blocks
    ) -> tuple[Leaves, Blocks]:
        leaves, view = kernels.apply(leaves, view, delta)
        leaves = kernels.blend(leaves, view, sent, sync.blend)
        return kernels.settle(leaves, update), view

    ways: dict[str, Callable[..., tuple[Leaves, Blocks]]] = {
        "rebase": rebase,
        "blend": blend,
        "overwrite": overwrite,
    }
    return ways[sync.adopt]


# --- Traffic


def _traffic(
    island: Island, fragments: "Sequence[FragmentShapes]", hosts: int
) -> tuple[HostTraffic, ...]:
    devices = list(island.mesh.devices.flat)
    host_of = {device.id: place * hosts // len(devices) for place, device in enumerate(devices)}
    return tuple(
        _host_traffic(fragments, host, lambda device: host_of[device.id]) for host in range(hosts)
    )


def _host_traffic(
    fragments: "Sequence[FragmentShapes]", host: int, process_of: Callable[[Any], int]
) -> HostTraffic:
    found: dict[Any, tuple[int, int, int]] = {}
    up = down = objects = 0
    for each in fragments:
        key = (each.kernels.placed, each.fragment.size)
        if key not in found:
            found[key] = _fragment_traffic(each, host, process_of)
        up, down, objects = (a + b for a, b in zip((up, down, objects), found[key], strict=True))
    return HostTraffic(host=host, bytes_up=up, bytes_down=down, objects_up=objects)


def _fragment_traffic(
    each: FragmentShapes, host: int, process_of: Callable[[Any], int]
) -> tuple[int, int, int]:
    """Returns bytes up, bytes down and objects up of one host in a round of one fragment."""
    sync, block, size = each.sync, each.kernels.block, each.fragment.size
    ownership = make_ownership(each.kernels, host, process_of)
    parts = slices.cut(ownership.owned, max(1, sync.shard_elements // block))
    up = sum(shards.shard_bytes(sync.codec, len(part) * block, block) for part in parts)
    if len(ownership.held) * block == size:
        return up, shards.delta_bytes(sync.delta_codec, size, block), len(parts)
    return up, shards.range_bytes(sync.delta_codec, size, block, ownership.held), len(parts)


# --- Programs and shapes


class CompiledProgram(NamedTuple):
    """A compiled program, and a lower bound on the bytes that it reads and writes on a device."""

    compiled: jax.stages.Compiled
    moved_bytes: int


def programs(
    function: Callable[..., Any], *given: Any, touched: Mapping[str, int]
) -> list[CompiledProgram]:
    """Compiles the programs that a call of `function` starts, and returns them in that order.

    Each jitted function within `function` is one program. It is compiled by itself, as JAX does
    when `function` is called with arrays, for the shardings of the earlier programs' results.

    Args:
        function: a function of trees of arrays that computes only in jitted functions.
        given: the arguments of `function`, as shapes with shardings; the first is a dictionary.
        touched: for each leaf of the first argument, by name, the bytes on one device that the
            programs read or write.
    """
    traced = jax.make_jaxpr(function)(*given)
    values: dict[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    values |= dict(zip(traced.jaxpr.invars, jax.tree.leaves(given), strict=True))
    # If the fragment has some rows of a tensor, the other rows are not touched.
    bytes_of = dict(zip(traced.jaxpr.invars, jax.tree.leaves(touched), strict=False))
    bytes_of |= dict.fromkeys(traced.jaxpr.constvars, 0)
    found = []
    for call in traced.jaxpr.eqns:
        assert "jaxpr" in call.params, f"{call.primitive} is started outside of a program"
        taken = [one for one in call.invars if not isinstance(one, Literal)]
        arguments = [one.val if isinstance(one, Literal) else values[one] for one in call.invars]
        donated = [index for index, gone in enumerate(call.params["donated_invars"]) if gone]
        program = jax.jit(jaxpr_as_fun(call.params["jaxpr"]), donate_argnums=donated)
        compiled = program.lower(*arguments).compile()
        places = jax.tree.leaves(compiled.output_shardings)
        for index, (result, place) in enumerate(zip(call.outvars, places, strict=True)):
            shape: Any = result.aval
            values[result] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)
            before = call.invars[donated[index]] if index < len(donated) else None
            if before in bytes_of and values[before].shape == shape.shape:
                bytes_of[result] = bytes_of[before]
        bytes_of |= {
            one: device_bytes(values[one]) for one in (*taken, *call.outvars) if one not in bytes_of
        }
        moved = sum(bytes_of[one] for one in (*taken, *call.outvars))
        found.append(CompiledProgram(compiled, moved))
    return found


def cost(started: Iterable[CompiledProgram]) -> ProgramCost:
    """Returns the cost on one device of programs that run in order and whose results are kept."""
    moved = results = temporary = accessed = 0
    between = []
    for program in started:
        analysis = _analysis(program.compiled)
        results += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        temporary = max(temporary, analysis.temp_size_in_bytes)
        own = exchanges(program.compiled.as_text() or "")
        # Bytes sent to other devices are read here; those received are written.
        moved += program.moved_bytes + 2 * sum(one.received * one.times for one in own)
        accessed += round((program.compiled.cost_analysis() or {}).get("bytes accessed", 0))
        between += own
    exchanged = sum(one.received * one.times for one in between)
    largest = max((one.received for one in between), default=0)
    return ProgramCost(moved, results + temporary, exchanged, largest, accessed)


def device_bytes(shapes: Any) -> int:
    """Returns the bytes that arrays of a tree of shapes take on one device, by their shardings.

    A shape without a sharding counts whole.
    """
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _analysis(program: jax.stages.Compiled) -> Any:
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis
