"""One worker of torchft's DiLoCo over Gloo, for `bench.headline_round`; needs torch and torchft.

Prints a line for each synchronization round: the seconds that training waited for it. Run by a
Python that has both packages; it imports nothing of this project. Rank 0 also starts the lighthouse
and prints its address first.
"""

import argparse
import io
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

LIMIT = timedelta(seconds=120)


def main() -> None:
    """Take rounds, one after each inner step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--durable", default="", help="file for rank 0's state after each round")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.workers))
    lighthouse = None
    if not args.lighthouse:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=args.workers)
        args.lighthouse = lighthouse.address()
        print(args.lighthouse, flush=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    width = round(args.parameters**0.5)
    model = torch.nn.Linear(width, args.parameters // width, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=args.workers,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"worker-{args.rank}",
        hostname="127.0.0.1",
    )
    gradient = torch.randn_like(model.weight)
    with DiLoCo(manager, [model], inner, outer, sync_every=1) as diloco:
        hook = diloco._step_post_hook  # noqa: SLF001 - what a round is, without the inner step
        for remove in diloco._hooks:  # noqa: SLF001
            remove.remove()
        for _ in range(args.rounds):
            model.weight.grad = gradient.clone()
            inner.step()
            began_s = time.perf_counter()
            hook(inner, (), {})
            if args.durable and args.rank == 0:
                _store(model, outer, args.durable)
            print(time.perf_counter() - began_s, flush=True)
    manager.shutdown()
    if lighthouse is not None:
        lighthouse.shutdown()


def _store(model: torch.nn.Module, outer: torch.optim.Optimizer, path: str) -> None:
    """Parameters and outer state on disk before training goes on."""
    data = io.BytesIO()
    torch.save({"model": model.state_dict(), "outer": outer.state_dict()}, data)
    with open(f"{path}.part", "wb") as file:  # noqa: PTH123
        file.write(data.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)  # noqa: PTH105


if __name__ == "__main__":
    main()
