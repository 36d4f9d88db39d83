"""The launcher: one script, several local worker processes, one command.

What torchrun is to PyTorch:

    python -m tf_optimizers.launch --workers 2 train.py --epochs 3
    python -m tf_optimizers.launch --workers 2 -m package.train --epochs 3

and in a cell of a Colab notebook, after `%%writefile train.py` in another:

    !python -m tf_optimizers.launch --workers 2 train.py --epochs 3

starts `python train.py --epochs 3` twice, with `TF_CONFIG` set to a cluster
of two workers, from which `tf.distribute.MultiWorkerMirroredStrategy()` takes
its place. All that follows the script or module belongs to it.

Options:
    --workers N: int >= 1. Worker processes. Required.
    --devices-per-worker M: int >= 1. Logical CPU devices of each worker.
        Defaults to `1`, which leaves TensorFlow as it is; with more, it is
        imported and configured before the script starts.
    --host ADDRESS: an address of this machine, put into `TF_CONFIG`.
        Defaults to `127.0.0.1`. Workers find each other there alone, but
        TensorFlow's server has no encryption, asks for no password and
        listens on all interfaces, whatever the address (2.21, `ss -tln`):
        on an open network, close its ports by a firewall.
    --grace-period SECONDS: number >= 0. Time between the request to end and
        SIGKILL. Defaults to `10`.
    --max-restarts K: int >= 0. How often to start all workers anew, on new
        ports, when one fails. A script that passes
        `tfo.callbacks.BackupAndRestore` to `fit` then goes on where its last
        backup was; `TF_OPTIMIZERS_RESTART` in its environment counts from 0.
        A signal to the launcher ends it for good. Defaults to `0`.
    --restart-pause SECONDS: number >= 0. Time from the end of all workers to
        the first restart. It doubles with every restart, up to 60, so that
        what made them fail can pass. Defaults to `1`.

A worker is what `python -u script` would be: the same `sys.argv`, `sys.path`,
`__main__`, folder and environment plus `TF_CONFIG`. Its stdin is empty. Its
stdout and stderr appear on the launcher's, each line behind `[worker 0] `. A
carriage return ends a line too, so each state of a progress bar is one. What
would go to a stream that is closed from the start (`>&-`) is dropped.
Threads are TensorFlow's default, as many per worker as there are cores.

The first worker that fails ends the others by SIGTERM; what has happened, and
whether all are started anew, stands on stderr behind `[launcher] `. Ctrl-C,
SIGTERM and the end of the terminal (SIGHUP) are passed on to all; a second
Ctrl-C or SIGTERM kills all at once. What a worker has started ends with it,
unless it has left the worker's session (`setsid`): when the launcher returns,
nobody else is left. Should it be killed itself, all are killed at once.

A port stays reserved from before TensorFlow takes it until the launcher ends.
Only a program that insists on that very number can still take it; the worker
then fails with TensorFlow's "Could not start gRPC server".

Exit codes:
    0: All workers ended with 0.
    1: The launcher's output could not be written, or a worker not started.
    2: The command line is wrong; nothing was started.
    128 + s: The launcher got signal s (130 after Ctrl-C, 143 after SIGTERM),
        or s killed the worker that failed first.
    Any other: That of the worker that failed first.
After restarts, those of the last start. A signal that comes after a failure
prevents a restart, and leaves the code as it is.
"""
