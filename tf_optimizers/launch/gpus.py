"""Assigns the GPUs of a machine to its workers."""

import re
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
# If Slurm has set one of these variables, it has set `VISIBLE`, too.
OF_SLURM = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"
_LISTING_SECONDS = 60


def divide_gpus(
    workers: int,
    per_worker: int | None,
    environment: Mapping[str, str],
    launcher: int = 0,
    launchers: int = 1,
) -> list[dict[str, str]]:
    """Return the environment variables that select each worker's GPUs.

    Args:
        workers: The number of workers of this launcher.
        per_worker: The number of GPUs of each worker. 0 hides all GPUs. With
            None, workers divide the machine's GPUs, or those that Slurm has
            given to the job. If there are no GPUs, or if
            `CUDA_VISIBLE_DEVICES` is set outside of a Slurm job with GPUs, None
            leaves the environment unchanged.
        environment: The launcher's environment variables.
        launcher: The index of this launcher on its machine.
        launchers: The number of launchers on this machine. They divide its
            GPUs, unless Slurm has given each launcher its own GPUs.

    Raises:
        ValueError: If too few GPUs are visible.
    """
    chosen = environment.get(VISIBLE)
    of_slurm = [name for name in OF_SLURM if environment.get(name)]
    if per_worker == 0:
        return [{VISIBLE: "-1"}] * workers
    if per_worker is None and chosen is not None and not of_slurm:
        return [{}] * workers
    gpus = list_gpus() if chosen is None else _indices_in(chosen)
    # Slurm lists all GPUs of the node, or only this launcher's own GPUs. In the
    # second case, no other launcher uses the listed GPUs.
    if of_slurm and environment.get("SLURM_GPUS_ON_NODE") != str(len(gpus)):
        launcher, launchers = 0, 1
    everyone = launchers * workers
    if per_worker is None:
        if not gpus:
            return [{}] * workers
        per_worker = len(gpus) // everyone
    if per_worker == 0 or per_worker * everyone > len(gpus):
        raise _too_few(len(gpus), everyone, per_worker, of_slurm)
    first = launcher * workers
    return [
        {VISIBLE: ",".join(gpus[i * per_worker : (i + 1) * per_worker])}
        for i in range(first, first + workers)
    ]


def launchers_of_host(
    hosts: Sequence[str], rank: int, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Return a launcher's index on its host, and the number of launchers there.

    A launcher with a list of GPUs in its environment counts as the only one.

    Args:
        hosts: "host" or "host:port" of every launcher.
        rank: The index of the launcher in `hosts`.
        environment: The launcher's environment variables.
    """
    if VISIBLE in environment:
        return 0, 1
    names = [re.sub(r":\d+$", "", host) for host in hosts]
    own = "".join(names[rank:][:1])  # "" if there is no such launcher.
    return names[:rank].count(own), names.count(own)


def _indices_in(visible: str) -> list[str]:
    """Return the GPUs in a value of `VISIBLE`."""
    # CUDA ignores a negative index and all indices after it.
    return [g for g in re.sub(r"(^|,)\s*-.*", "", visible).split(",") if g]


def _too_few(
    gpus: int, workers: int, per_worker: int, of_slurm: Sequence[str]
) -> ValueError:
    """Return the error for too few visible GPUs.

    `per_worker` is 0 if the user has omitted the option.
    """
    sharing = f"unset {' and '.join(of_slurm)}"
    if not of_slurm:
        sharing = f"set {VISIBLE} yourself"
    if per_worker:
        sharing += ", without `--gpus-per-worker`,"
    return ValueError(
        "The number of visible GPUs must be at least "
        f"{workers * (per_worker or 1)}. Received: visible GPUs: {gpus}, "
        f"workers: {workers}. Start fewer workers, pass `--gpus-per-worker 0` "
        "to train on CPUs, or "
        f"{sharing} to let workers share a GPU."
    )


def list_gpus() -> list[str]:
    """Return the indices of this machine's NVIDIA GPUs, in CUDA's numbering."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_LISTING_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # Probably, there is no driver, and so no usable GPU.
    return [str(i) for i in range(len(re.findall("^GPU ", listing, re.M)))]
