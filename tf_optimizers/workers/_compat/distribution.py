"""Imports the private names of TensorFlow that only the strategy needs.

The names are in a separate module, so that optimizers do not import them.
"""

# ruff: noqa: F401

# Stages of datasets, to find seeds and random maps.
from tensorflow.python.data.ops.map_op import _MapDataset, _ParallelMapDataset
from tensorflow.python.data.ops.shuffle_op import (
    _ShuffleDataset as ShuffleDataset,
)

# The implementation of `MultiWorkerMirroredStrategy`, which our strategy
# extends.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)

# Reductions, the keys of groups, and one replica's collectives.
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)

# Converts replicas' nests into a nest of per-replica values, and back.
from tensorflow.python.distribute.distribute_utils import (
    regroup,
    select_replica,
)

# Distributed data and their types, for looking one batch ahead.
from tensorflow.python.distribute.input_lib import (
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionSpec,
    DistributedIterator,
    DistributedIteratorSpec,
)

# Per-replica values of a batch; our subclasses add the number of rows.
from tensorflow.python.distribute.values import PerReplica, PerReplicaSpec

# Functions to wait for asynchronous operations, and to read the seed that
# `tf.random.set_seed` has set.
from tensorflow.python.eager.context import async_wait
from tensorflow.python.eager.context import global_seed as tensorflow_seed

MAPS = (_MapDataset, _ParallelMapDataset)
