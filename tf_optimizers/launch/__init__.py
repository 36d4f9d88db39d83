"""The launcher: one script, several local worker processes, one command.

It is to TensorFlow what torchrun is to PyTorch:

    python -m tf_optimizers.launch --workers 2 train.py --epochs 3

runs `python train.py --epochs 3` twice, with `TF_CONFIG` set to a cluster of
two workers, which `tf.distribute.MultiWorkerMirroredStrategy()` reads.
Everything after the script belongs to the script. It also runs a module, and it
runs in a Colab notebook, in a cell after the one that begins with
`%%writefile train.py`:

    python -m tf_optimizers.launch --workers 2 -m package.train --epochs 3
    !python -m tf_optimizers.launch --workers 2 train.py --epochs 3

Options:
    --workers N: int >= 1. Worker processes. Required.
    --devices-per-worker M: int >= 1. Logical CPU devices of each worker.
        Defaults to `1`, which leaves TensorFlow as it is. With more,
        TensorFlow is imported and configured before the script starts.
    --host ADDRESS: an address of this machine, for `TF_CONFIG`.
        Defaults to `127.0.0.1`. Workers find each other at this address only,
        but TensorFlow's server has no encryption, asks for no password and
        listens on all interfaces, whatever the address (2.21, `ss -tln`):
        on an open network, close its ports with a firewall.
    --grace-period SECONDS: number >= 0. Time between the request to end and
        SIGKILL. Defaults to `10`.
    --max-restarts K: int >= 0. How often to restart all workers, on new
        ports, when one fails. A script that passes
        `tfo.callbacks.BackupAndRestore` to `fit` then resumes from its last
        backup. `TF_OPTIMIZERS_RESTART` in its environment counts the restarts,
        from 0. A signal to the launcher ends the run for good.
        Defaults to `0`.
    --restart-pause SECONDS: number >= 0. Time from the end of all workers to
        the first restart. It doubles with every restart, up to 60, so that
        whatever made them fail can pass. Defaults to `1`.

A worker runs as `python -u script` would, with the same `sys.argv`, `sys.path`,
`__main__`, working directory and environment, plus `TF_CONFIG` and, so that
workers need no proxy to reach each other, `no_grpc_proxy`. Its stdin is
empty. The launcher forwards its stdout and stderr, each line prefixed with
`[worker 0] `. A carriage return ends a line too, so each state of a progress
bar becomes a line. Output to a stream that was closed from the start (`>&-`) is
dropped. Unless `TF_NUM_INTRAOP_THREADS` is set, the launcher sets it: an
operation of TensorFlow has as many threads as there are cores for each worker.
Unless `PYTHONHASHSEED` is set, it is 0, so that the elements of a set have one
order on all workers, and after a restart.

When a worker fails, the launcher ends the others with SIGTERM. Lines on stderr,
prefixed with `[launcher] `, say what happened and whether all are restarted.
Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) are passed on to all
workers; a second Ctrl-C or SIGTERM kills all of them at once. The processes
that a worker has started end with it, unless they have left its session
(`setsid`). When the launcher returns, none of them is left. If the launcher
itself is killed, all workers are killed at once.

The launcher reserves the workers' ports before TensorFlow takes them, and until
it ends. Only a program that insists on that very number can still take one; the
worker then fails with TensorFlow's "Could not start gRPC server".

Exit codes:
    0: All workers ended with 0.
    1: The output could not be written, or a worker could not be started.
    2: The command line is wrong; nothing was started.
    128 + s: The launcher received signal s (130 after Ctrl-C, 143 after
        SIGTERM), or signal s killed the worker that failed first.
    Any other: The code of the worker that failed first.
After restarts, the code is that of the last attempt. A signal that comes after
a failure prevents a restart, and leaves the code as it is.
"""
