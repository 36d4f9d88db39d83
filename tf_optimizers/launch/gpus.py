"""Assigns the GPUs of a machine to its workers."""

import re
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
# How long `nvidia-smi` may take to list the GPUs.
_LISTING_SECONDS = 60


def divide_gpus(
    workers: int, per_worker: int | None, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment variables that show each worker its own GPUs.

    Args:
        workers: The number of workers on this machine.
        per_worker: The number of GPUs of each worker. 0 hides all GPUs. None
            divides the machine's GPUs, but changes nothing if there are no
            GPUs, or if the user has set `CUDA_VISIBLE_DEVICES`.
        environment: The environment variables.

    Raises:
        ValueError: If too few GPUs are visible.
    """
    chosen = environment.get(VISIBLE)
    if per_worker == 0:
        return [{VISIBLE: "-1"}] * workers
    if per_worker is None and chosen is not None:
        return [{}] * workers
    if chosen is None:
        gpus = list_gpus()
    else:  # CUDA ignores a negative index and all indices after it.
        gpus = [g for g in re.sub(r"(^|,)\s*-.*", "", chosen).split(",") if g]
    if per_worker is None:
        if not gpus:
            return [{}] * workers
        per_worker = len(gpus) // workers
    if per_worker == 0 or per_worker * workers > len(gpus):
        raise ValueError(
            f"At least {workers * (per_worker or 1)} GPUs must be visible for "
            f"{workers} workers. Received: {len(gpus)} visible GPUs. Start "
            "fewer workers, pass `--gpus-per-worker 0` to train on CPUs, or "
            f"set {VISIBLE} yourself to let workers share a GPU."
        )
    return [
        {VISIBLE: ",".join(gpus[i * per_worker : (i + 1) * per_worker])}
        for i in range(workers)
    ]


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
        return []  # Without the tool or the driver, TensorFlow finds no GPU.
    return [str(i) for i in range(len(re.findall("^GPU ", listing, re.M)))]
