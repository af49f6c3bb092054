"""One rank of four that train a module under FSDP2 or DDP: what `test_ranks.py` starts.

python -m rank_loop CONFIG LEARNER PORT RANKS RANK KIND [alone|anew]: `alone` shards nothing, `anew`
shards otherwise after three steps. Prints where it was done, and the most bytes of JAX's arrays.
"""

import os
import sys

import jax
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

import diloco.torch
from diloco.common.process import log

WIDTH, CLASSES, BATCH = 128, 10, 32  # ten rows are no equal parts for four ranks


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, CLASSES),
    )


def batch_at(position, rank):
    """The rank's part of a batch: classes of points by a fixed matrix."""
    own = torch.Generator().manual_seed(1000 * position + rank)
    points = torch.randn(BATCH, WIDTH, generator=own)
    of = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(7))
    return points, (points @ of).argmax(-1)


def loss_of(module, position, rank):
    points, classes = batch_at(position, rank)
    return torch.nn.functional.cross_entropy(module(points), classes)


def check_viewed(island, module, rank):
    """An evaluation sees what all share, and training goes on from what it was."""
    with torch.no_grad():
        before = loss_of(module, 0, rank)
        with island.viewed():
            seen = loss_of(module, 0, rank)
        assert before == loss_of(module, 0, rank)
        assert before != seen


def bytes_here():
    """Of all of JAX's arrays, what lies on this rank's device."""
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards)


def shard_otherwise(layer):
    whole = layer.weight.redistribute(placements=[Replicate()])
    layer.register_parameter("weight", torch.nn.Parameter(whole.detach()))


def main():
    config, learner, port, ranks, rank, kind, *does = sys.argv[1:]
    log.configure("info")
    ranks, rank = int(ranks), int(rank)
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    module = model()
    if kind == "fsdp" and does != ["alone"]:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (*module[::2], module):
            fully_shard(layer, mesh=mesh)
    given = module if kind == "fsdp" else DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
    most = 0
    with diloco.torch.join(config, learner=learner, module=given) as island:
        island.restore(optimizer)
        while not island.done:
            if island.position % 16 == 5:
                check_viewed(island, given, rank)
            optimizer.zero_grad()
            loss = loss_of(given, island.position, rank)
            loss.backward()
            optimizer.step()
            if does == ["anew"] and island.position == 3:
                shard_otherwise(module[0])
            island.step(loss=loss, save=optimizer)
            most = max(most, bytes_here())
    print(f"rank {rank} done at {island.position}, {most} bytes")


if __name__ == "__main__":
    main()
