"""A module that several processes (ranks) train: each rank is a host of one learner (ADR 21).

FSDP2 gives a rank a part of each parameter (a DTensor), DDP the whole parameter. JAX has one CPU
device for each rank, in a mesh like the ranks' device mesh, and arrays that are sharded as the
parameters are. So each rank reads, encodes, uploads and fetches its own part. Rank 0 plans the step
boundaries, and alone connects to NATS.
"""

import socket
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.common.process.config import first_rank
from diloco.common.process.nats_server import LOOPBACK, free_port
from diloco.common.protocol.errors import ConfigError, ParametersError
from diloco.learner.hosts.messages import MEET_S
from diloco.torch.tensors import ModuleTensors


class RankTensors(ModuleTensors):
    """Reads and writes one rank's parts of a module's parameters, by parameter name.

    To be made on all ranks; JAX's distributed runtime is started.

    Args:
        module: the module, wrapped by `fully_shard` or in DistributedDataParallel.
        replicated: the module is wrapped in neither way, and the caller keeps the parameters of all
            ranks equal.

    Raises:
        ConfigError: parameters would differ by rank, or are sharded over other ranks than all; or
            rank 0's address is unknown.
    """

    def __init__(self, module: torch.nn.Module, *, replicated: bool = False) -> None:
        in_ddp = isinstance(module, DistributedDataParallel)
        self._module = module.module if in_ddp else module
        self._sharded = [one for one in self._module.modules() if isinstance(one, FSDPModule)]
        self._reshard()
        super().__init__(self._module)
        _meet()
        cut = [one for one in self._parameters.values() if isinstance(one, DTensor)]
        if not (in_ddp or replicated) and len(cut) < len(self._parameters):
            raise ConfigError(
                f"{dist.get_world_size()} ranks train this module, and their parameters would"
                " drift apart",
                hint="join with it in DistributedDataParallel, or behind fully_shard",
            )
        ranks = cut[0].device_mesh.mesh if cut else torch.arange(dist.get_world_size())
        if ranks.numel() != dist.get_world_size() or any(
            not torch.equal(one.device_mesh.mesh, ranks) for one in cut
        ):
            raise ConfigError(
                "the module's parameters lie over other ranks than all",
                hint="shard all of them over one device mesh of the whole process group",
            )
        axes = tuple(f"axis{number}" for number in range(ranks.dim()))
        kinds = (AxisType.Auto,) * ranks.dim()
        self._mesh = Mesh(np.array(jax.devices())[ranks.numpy()], axes, axis_types=kinds)
        self._plan = {name: _plan(one) for name, one in self._parameters.items()}

    def sharding(self, name: str) -> NamedSharding:
        """Returns a parameter's sharding in JAX.

        The sharding is replicated on all ranks if the ranks divide the parameter unequally.
        """
        one = self._parameters[name]
        cuts: list[tuple[str, ...]] = [()] * one.dim()
        for axis, placement in zip(self._mesh.axis_names, self._plan[name], strict=False):
            if placement.is_shard():
                cuts[placement.dim] = (*cuts[placement.dim], axis)
        sizes = self._mesh.shape
        for size, names in zip(one.shape, cuts, strict=True):
            if size % int(np.prod([sizes[axis] for axis in names], dtype=int)):
                return NamedSharding(self._mesh, PartitionSpec())
        return NamedSharding(self._mesh, PartitionSpec(*(names or None for names in cuts)))

    def check(self) -> None:
        """Checks that the module's parameters are the tensors that joined, sharded as then.

        Raises:
            ParametersError: a parameter is another tensor, or is sharded differently.
        """
        now = dict(self._module.named_parameters())
        for name, one in self._parameters.items():
            if now.get(name) is not one or _plan(one) != self._plan[name]:
                raise ParametersError(
                    f"the module's parameter {name!r} is not the one that joined, or is sharded in"
                    " another way",
                    hint="shard the module before this learner joins; join again after a change",
                )

    def _local(self, name: str) -> torch.Tensor:
        """Returns this rank's part of a parameter; all of it if ranks divide it unequally.

        In the latter case this is a collective, which all ranks must call.
        """
        self._reshard()
        one = self._parameters[name].detach()
        if not isinstance(one, DTensor):
            return one
        return one.to_local() if self._is_cut(name) else one.full_tensor()

    def _set(self, name: str, values: torch.Tensor) -> None:
        self._reshard()
        one = self._parameters[name].detach()
        if not isinstance(one, DTensor):
            one.copy_(values)
        elif self._is_cut(name):
            one.to_local().copy_(values)
        else:
            one.to_local().copy_(_part(values, one))

    def _reshard(self) -> None:
        """Frees whole parameters that a forward pass without a backward pass has gathered.

        Otherwise the next forward pass would use these old values.
        """
        for one in self._sharded:
            one.reshard()

    def _is_cut(self, name: str) -> bool:
        return any(self.sharding(name).spec)


def _plan(one: Any) -> tuple[Any, ...]:
    return tuple(one.placements) if isinstance(one, DTensor) else ()


def _part(values: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Returns this rank's part of a whole tensor that the ranks divide unequally."""
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            ranks, own = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            parts = torch.chunk(values, ranks, placement.dim)
            values = parts[own] if own < len(parts) else values.narrow(placement.dim, 0, 0)
    return values


def _meet() -> None:
    """Starts JAX's distributed runtime, with one CPU device for each rank.

    Does nothing if that runtime has started already.

    Raises:
        ConfigError: the ranks are on several machines, and no setting gives rank 0's address.
    """
    if jax.distributed.is_initialized():
        return
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (socket.gethostname(), free_port()))
    machines = sorted({machine for machine, _ in told})
    first = LOOPBACK if len(machines) == 1 else first_rank()
    if first is None:
        raise ConfigError(
            f"the ranks are on several machines, {', '.join(machines)}, and nothing says where rank"
            " 0 is",
            hint="start them by torchrun, or set MASTER_ADDR to rank 0's address on all",
        )
    address = f"{first}:{told[0][1]}"
    # JAX's service would catch SIGTERM, by which a learner is asked to leave.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address,
        dist.get_world_size(),
        dist.get_rank(),
        initialization_timeout=int(MEET_S),
        coordinator_bind_address=address,
    )
