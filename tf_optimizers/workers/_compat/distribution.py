"""Imports the private names of TensorFlow that only the strategy needs.

They are in a separate module, so that optimizers do not import them.
"""

from tensorflow.python.data.ops.map_op import _MapDataset, _ParallelMapDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)
from tensorflow.python.distribute.distribute_utils import (
    regroup,
    select_replica,
)
from tensorflow.python.distribute.input_lib import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    DistributedIterator,
    DistributedIteratorSpec,
)
from tensorflow.python.distribute.values import (
    DistributedVariable,
    PerReplica,
    PerReplicaSpec,
)
from tensorflow.python.eager import context

__all__ = [
    # The implementation of `MultiWorkerMirroredStrategy`, which ours extends.
    "CollectiveAllReduceExtended",
    # Its reductions; the keys of groups; one replica's collectives.
    "CollectiveAllReduce",
    "CollectiveKeys",
    "CollectiveReplicaLauncher",
    # A nest of per-replica values from the replicas' nests, and back.
    "regroup",
    "select_replica",
    # Distributed data, to look one batch ahead, and their types.
    "DistributedDatasetsFromFunction",
    "DistributedDatasetsFromFunctionSpec",
    "DistributedIterator",
    "DistributedIteratorSpec",
    # A strategy's variable, so that Python's `float` can convert it.
    "DistributedVariable",
    # A batch's per-replica values, to which ours add the number of rows.
    "PerReplica",
    "PerReplicaSpec",
    # Stages of datasets, to find seeds and random maps.
    "MAPS",
    "ShuffleDataset",
    # The seed that `tf.random.set_seed` was given.
    "global_seed",
    # Waits for operations that run asynchronously.
    "async_wait",
]

MAPS = (_MapDataset, _ParallelMapDataset)
ShuffleDataset = _ShuffleDataset
global_seed = context.global_seed
async_wait = context.async_wait
