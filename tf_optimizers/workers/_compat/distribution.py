"""Imports the private names of TensorFlow that only the strategy needs.

They are kept apart, so that the optimizers do not need these modules.
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
    # What `MultiWorkerMirroredStrategy` does its work in, which ours adapts.
    "CollectiveAllReduceExtended",
    # What that reduces with; the numbers of groups; one replica's collectives.
    "CollectiveAllReduce",
    "CollectiveKeys",
    "CollectiveReplicaLauncher",
    # A nest of values of replicas from the replicas' nests, and back.
    "regroup",
    "select_replica",
    # Distributed data, which look one batch ahead, and how they are passed.
    "DistributedDatasetsFromFunction",
    "DistributedDatasetsFromFunctionSpec",
    "DistributedIterator",
    "DistributedIteratorSpec",
    # What a strategy makes of a variable, which Python is to convert.
    "DistributedVariable",
    # Each replica's part of a batch, which is to say more.
    "PerReplica",
    "PerReplicaSpec",
    # Parts of datasets, to find seeds and random maps in.
    "MAPS",
    "ShuffleDataset",
    # What `tf.random.set_seed` was given.
    "global_seed",
    # The end of what runs asynchronously.
    "async_wait",
]

MAPS = (_MapDataset, _ParallelMapDataset)
ShuffleDataset = _ShuffleDataset
global_seed = context.global_seed
async_wait = context.async_wait
