"""One rank of a trainer of `examples/trainers.py`: what `test_trainers.py` starts.

python -m trainer_ranks KIND CONFIG LEARNER FOLDER PORT RANKS RANK

KIND: transformers or lightning, under DDP; sharded: Lightning's, under FSDP2; raises: transformers'
whose model raises.
"""

import os
import sys

kind, config, learner, folder, port, ranks, rank = sys.argv[1:]
# As torchrun sets them.
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}

from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from examples import trainers  # noqa: E402

STEPS = 30  # of a model that raises


class Sharded(trainers.Tiny):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def raising():
    seen = []

    def forward(*_):
        seen.append(1)
        if len(seen) > STEPS * trainers.ACCUMULATED:
            raise RuntimeError("of a user's own model")

    module = trainers.model()
    module.register_forward_pre_hook(forward)
    return module


def main():
    where, devices = (config, learner, folder), int(ranks)
    match kind:
        case "transformers":
            trainers.of_transformers(*where)
        case "raises":
            trainers.of_transformers(*where, module=raising())
        case "lightning":
            trainers.of_lightning(*where, devices=devices)
        case "sharded":
            strategy = ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)
            trainers.of_lightning(*where, Sharded(), devices=devices, strategy=strategy)


if __name__ == "__main__":
    main()
