"""DGCMomentum with sums by shards, whether they are worth it or not."""

import dgc
import numpy as np
from real_workers import report
from scripts import transport

import tf_optimizers as tfo
from tf_optimizers.compression.compressor import Compressor
from tf_optimizers.compression.sharded import ShardedExchange

STEPS = 30


def is_alike(strategy, variables):
    """Tell whether this worker's replicas have the same weights to the bit."""
    return all(
        np.array_equal(part, parts[0], equal_nan=True)
        for parts in (
            strategy.experimental_local_results(v.value) for v in variables
        )
        for part in parts
    )


def drain(strategy):
    """Return weights by step, after one gradient, all of it of one shard."""
    size = 4000
    run = dgc.Run(
        strategy, {"w": np.zeros(size)}, 1.0, momentum=0.0, sparsity=(0.9,)
    )
    shards = ShardedExchange(
        run.optimizer._compressor.wire, [size], [400]
    ).shards
    address = shards.addresses([np.arange(size)])
    (mine,) = np.nonzero(address.numpy() // shards.span == 0)
    gradient = np.zeros(size, "float32")
    gradient[mine[:400]] = np.random.default_rng(0).uniform(1, 2, 400)
    replicas = strategy.num_replicas_in_sync
    weights = []
    for step in range(10):
        run.step([[(step == 0) * gradient]] * replicas, eager=step == 1)
        weights.append(run.weights()[0].tolist())
    return {
        "kept": shards.sums[0],
        "total": (-replicas * gradient).tolist(),
        "weights": weights,
        "left": float(np.abs(run.memory("residual")).max()),
    }


def not_finite(strategy):
    """Return weights after a step with a NaN and an inf on one replica each."""
    run = dgc.Run(strategy, {"w": np.zeros(4000)}, 1.0, sparsity=(0.9,))
    gradients = dgc.make_gradients(0, [4000], strategy.num_replicas_in_sync)
    gradients[0][0][17] = np.nan
    gradients[-1][0][1234] = np.inf
    run.step(gradients)
    return {
        "weights": run.weights()[0].tolist(),
        "alike": is_alike(strategy, run.variables),
        "finite": bool(np.isfinite(run.memory("residual")).all()),
    }


def main():
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    Compressor.exchange_kind = "sharded"
    report(
        {
            "few steps": transport.balance(strategy, STEPS),
            "many steps": transport.balance(
                strategy, value_dtype="float16", momentum_masking=False
            ),
            "loco": transport.loco_balance(strategy, sync_every=2),
            "two bits": transport.balance(
                strategy, transport.MANY, value_dtype="int2"
            ),
            "bytes": transport.count_bytes(strategy),
            "bytes of few bits": transport.count_bytes(
                strategy, value_dtype="int4"
            ),
            "drain": drain(strategy),
            "not finite": not_finite(strategy),
        }
    )


if __name__ == "__main__":
    main()
