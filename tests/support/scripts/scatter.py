"""DGCMomentum, whose replicas sum a shard each: `scatter.py some`, or `all`.

Entries are summed by shards even where this saves no bytes.
"""

import sys

import dgc
import numpy as np
from real_workers import report
from scripts import transport

import tf_optimizers as tfo
from tf_optimizers.codes.values import CODES
from tf_optimizers.compression import exchanges
from tf_optimizers.compression.sharded_exchange import ShardedExchange

STEPS = 30


def drain(strategy):
    """Return weights by step, after one gradient in a single shard."""
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


def scales(strategy, dtypes):
    """Return `dgc.balances_of_scales` by the dtype of sent values."""
    return {
        dtype: dgc.balances_of_scales(strategy, value_dtype=dtype, **dgc.STAGES)
        for dtype in dtypes
    }


def few(strategy):
    """Return results with float32 values."""
    return {
        "few steps": transport.balance(strategy, STEPS),
        "bytes": transport.count_bytes(strategy),
        "drain": drain(strategy),
        "not finite": transport.not_finite(strategy),
    }


def others(strategy):
    """Return results with values of other dtypes, and with local steps."""
    return {
        "loco": transport.balance(
            strategy, 2 * STEPS, **transport.PLAIN, sync_every=2
        ),
        "many steps": transport.balance(
            strategy, value_dtype="float16", momentum_masking=False
        ),
        "two bits": transport.balance(
            strategy, transport.MANY, value_dtype="int2"
        ),
        "bytes of few bits": transport.count_bytes(
            strategy, value_dtype="int4"
        ),
        "not finite in two bits": transport.not_finite(
            strategy, value_dtype="int2"
        ),
    }


def main():
    """Report the results that the command line names."""
    strategy = tfo.SparseMultiWorkerMirroredStrategy()
    is_all = "all" in sys.argv
    dtypes = CODES if is_all else ["int2"]
    found = {
        "scales of gathered": scales(strategy, CODES if is_all else []),
    }
    exchanges.LEAST_SAVING = 0
    found |= few(strategy) | {"scales": scales(strategy, dtypes)}
    if is_all:
        found |= others(strategy)
    report(found)


if __name__ == "__main__":
    main()
