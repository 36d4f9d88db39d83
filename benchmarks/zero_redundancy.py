"""One worker with PyTorch's `ZeroRedundancyOptimizer`, for sharded_state.py.

As in `DistributedDataParallel`, gradients are in buckets, which gloo sums in
place. A bucket has at most 25 MB, or one larger gradient. The optimizer is
PyTorch's fused AdamW.
"""

import argparse
import json
import os
import pathlib

import sharded_state
import torch
import torch.distributed
from torch.distributed.optim import ZeroRedundancyOptimizer

BUCKET_BYTES = 25_000_000
SETTINGS = {"lr": 1e-3, "fused": True}


def join() -> None:
    """Join the workers in `TF_CONFIG`, with gloo."""
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{workers[0]}",
        rank=config["task"]["index"],
        world_size=len(workers),
    )


def with_buckets(
    parameters: list[torch.nn.Parameter],
) -> list[torch.Tensor]:
    """Give parameters gradients in buckets; return the buckets."""
    groups: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if size and size + 4 * parameter.numel() > BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += 4 * parameter.numel()
    buckets = []
    for group in groups:
        bucket = torch.full([sum(p.numel() for p in group)], 1e-3)
        parts = bucket.split([p.numel() for p in group])
        for parameter, part in zip(group, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        buckets.append(bucket)
    return buckets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    join()
    parameters = [
        torch.nn.Parameter(torch.full(shape, 0.1))
        for shape in sharded_state.MODELS[arguments.models]
    ]
    buckets = with_buckets(parameters)
    before = sharded_state.resident_bytes()
    if arguments.sharded:
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, **SETTINGS
        )
    else:
        optimizer = torch.optim.AdamW(parameters, **SETTINGS)

    def step() -> None:
        handles = [
            torch.distributed.all_reduce(bucket, async_op=True)
            for bucket in buckets
        ]
        for handle in handles:
            handle.wait()
        optimizer.step()

    result = sharded_state.measured(step, arguments.steps, before)
    inner = optimizer.optim if arguments.sharded else optimizer
    held = sum(
        moment.nbytes
        for state in inner.state.values()
        for name, moment in state.items()
        if name != "step"
    )
    fullest = torch.tensor(held)
    torch.distributed.all_reduce(fullest, torch.distributed.ReduceOp.MAX)
    if not torch.distributed.get_rank():
        result["state_bytes"] = int(fullest)
        arguments.output.write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
