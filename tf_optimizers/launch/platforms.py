"""Finds the machines of a cluster in its scheduler's environment variables.

TensorFlow's cluster resolvers are not used. They would load TensorFlow in the
launcher, and the resolvers for schedulers are unsuitable (TensorFlow 2.21):
`SlurmClusterResolver` sorts node10 before node2, `KubernetesClusterResolver`
reads the pods from the API server, and the resolver for SageMaker is not
public.
"""

import errno
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tf_optimizers.launch.gpus import launchers_of_host

# The first port of a machine, unless `--port` or the scheduler sets another.
PORT = 12345
_LAST_PORT = 65535
# How many seconds to wait until the workers of an earlier launcher have ended.
_ENDING_SECONDS = 5.0
# How many addresses a message shows before the last one.
_MOST_SHOWN = 4


class Place(NamedTuple):
    """The place of one launcher among all launchers of a cluster.

    Attributes:
        found: The platform and its variables, for messages.
        hosts: "host" or "host:port" of every launcher, by index.
        rank: The index of this launcher.
        local_index: The index of this launcher on its machine, or 0 if unknown.
        local_count: The number of launchers on its machine, or 1 if unknown.
        given: The `TF_CONFIG` that describes this place, or "".
    """

    found: str
    hosts: list[str]
    rank: int
    local_index: int = 0
    local_count: int = 1
    given: str = ""

    def addresses(self, workers: int, port: int) -> list[str]:
        """Return the host:port of every worker of every launcher.

        Raises:
            ValueError: If two workers would have the same address.
        """
        found: list[str] = []
        before: dict[str, int] = {}
        for each in self.hosts:
            match = re.fullmatch(r"(.+):(\d+)", each)
            host, own_port = match.groups() if match else (each, port)
            first = int(own_port) + before.get(each, 0)
            before[each] = before.get(each, 0) + workers
            found += [f"{host}:{first + i}" for i in range(workers)]
        if len({*found}) < len(found):
            fewer = ", or pass `--workers 1`" if workers > 1 else ""
            raise ValueError(
                "Two workers must not have the same address. A launcher's "
                "workers use consecutive ports, so different ports of a host "
                "must be at least `--workers` apart. Received: --workers "
                f"{workers}, but {self.found} has {', '.join(self.hosts)}. Set "
                f"ports that are further apart{fewer}."
            )
        return found

    def check_ports(self, addresses: Sequence[str]) -> None:
        """Raise unless the ports of this launcher's workers exist and are free.

        `addresses` contains the addresses of all workers.
        """
        workers = len(addresses) // len(self.hosts)
        deadline = time.monotonic() + _ENDING_SECONDS
        for address in addresses[self.rank * workers :][:workers]:
            port = int(address.rpartition(":")[2])
            if port > _LAST_PORT:
                raise ValueError(
                    f"A port must be at most {_LAST_PORT}. Received: {address} "
                    "for one of this launcher's workers. Set a lower first "
                    "port."
                )
            while _is_used(port):
                if time.monotonic() > deadline:
                    raise ValueError(
                        "The ports of this launcher's workers must be free. "
                        f"Received: {address}, but another process, perhaps "
                        f"of another job, uses port {port}. On all machines, "
                        "pass another `--port`. If the platform sets ports, "
                        "change these instead."
                    )
                time.sleep(0.1)

    def describe(self, addresses: Sequence[str]) -> str:
        """Return a sentence about the place and the addresses."""
        shown = ", ".join(addresses[:_MOST_SHOWN])
        if len(addresses) > _MOST_SHOWN:
            shown += f", ... {addresses[-1]}"
        return (
            f"{self.found}: index {self.rank} of {len(self.hosts)}, workers "
            f"at {shown}."
        )


def _is_used(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def find_place(
    kind: str, environment: Mapping[str, str], machines: int | None
) -> Place:
    """Return the place that a scheduler has given to this process.

    Args:
        kind: "auto", or a key of `FINDERS`.
        environment: The environment variables.
        machines: The value of `--machines`, or None.

    Raises:
        ValueError: If "auto" finds no platform, or cannot choose one; or if the
            environment is incomplete or malformed, or contradicts `machines`.
    """
    kind = _detect(environment) if kind == "auto" else kind
    place = FINDERS[kind](environment, machines)
    if machines is not None and machines != len(place.hosts):
        raise ValueError(
            "`--machines` must be the number of launchers in the cluster. "
            f"Received: --machines {machines}, but {place.found} has "
            f"{len(place.hosts)}. Leave `--machines` out."
        )
    if not 0 <= place.rank < len(place.hosts):
        raise ValueError(
            f"The index of this launcher must be in [0, {len(place.hosts)}). "
            f"Received: {place.rank} from {place.found}. Correct this index, "
            "or the number of launchers."
        )
    return place


def _detect(environment: Mapping[str, str]) -> str:
    found = [
        kind
        for kind, names in _SIGNS.items()
        if any(environment.get(name) for name in names)
    ]
    # Prefer `TF_CONFIG` to other variables. Vertex AI, TFJob and Ray Train set
    # it for TensorFlow. Schedulers set the others for jobs of any framework.
    if "tf-config" in found:
        return "tf-config"
    if len(found) == 1:
        return found[0]
    variables = "; ".join(
        f"{kind}: {', '.join(names)}" for kind, names in _SIGNS.items()
    )
    if found:
        raise ValueError(
            "`--cluster auto` must find a single platform. Received: "
            f"environment variables of {' and '.join(found)}. Pass `--cluster` "
            f"with one of these names, such as `--cluster {found[0]}`."
        )
    raise ValueError(
        "`--cluster auto` needs the environment variables of a platform. "
        f"Received: none ({variables}). Start this command through the "
        "scheduler (for example, with `srun`), or set `TF_CONFIG`."
    )


def _from_tf_config(
    environment: Mapping[str, str], machines: int | None
) -> Place:
    """Read the `TF_CONFIG` of TFJob, Ray Train, Vertex AI or the user."""
    hint = "Set it, or pass another `--cluster`."
    text = _get(environment, "TF_CONFIG", "this machine", hint)
    place = _place_in_jobs(text, "TF_CONFIG", ("chief", "worker"))
    index, count = launchers_of_host(place.hosts, place.rank, environment)
    return place._replace(given=text, local_index=index, local_count=count)


def _from_vertex(environment: Mapping[str, str], machines: int | None) -> Place:
    if environment.get("TF_CONFIG"):
        place = _from_tf_config(environment, machines)
        return place._replace(found="Vertex AI (TF_CONFIG)")
    text = _get(
        environment,
        "CLUSTER_SPEC",
        "Vertex AI",
        "Vertex AI sets it, or TF_CONFIG, in jobs with more than one replica.",
    )
    place = _place_in_jobs(text, "CLUSTER_SPEC", ("workerpool0", "workerpool1"))
    return place._replace(found="Vertex AI (CLUSTER_SPEC)")


def _place_in_jobs(text: str, name: str, jobs: Sequence[str]) -> Place:
    """Return the place of the task in `text`, the JSON of a cluster.

    The tasks of all jobs are numbered consecutively, in the order of `jobs`.
    """
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        hosts = [host for job in jobs for host in cluster.get(job, [])]
        job, index = task["type"], int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{name}` must be JSON with a cluster and a task. Received: "
            f"{name}={text!r} ({error!r}). Unset the variable, or set a "
            "`TF_CONFIG` such as that in docs/launch.md."
        ) from error
    is_known = {*cluster, job} <= {*jobs}
    if not is_known or not all(isinstance(host, str) for host in hosts):
        raise ValueError(
            f"`{name}` must contain only the jobs {' and '.join(jobs)}, each a "
            f"list of host:port. Received: {name}={text!r}. Configure no "
            "parameter servers, and start an evaluator without the launcher."
        )
    before = sum(len(cluster.get(j, [])) for j in jobs[: jobs.index(job)])
    return Place(name, hosts, before + index)


def _from_sagemaker(
    environment: Mapping[str, str], machines: int | None
) -> Place:
    hint = "SageMaker's training toolkit sets it in training jobs."
    names = "SM_HOSTS", "SM_CURRENT_HOST"
    text, host = (_get(environment, n, "SageMaker", hint) for n in names)
    try:
        # All workers must use the same order: algo-2 before algo-10.
        hosts = sorted(json.loads(text), key=lambda name: (len(name), name))
        index = hosts.index(host)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "`SM_HOSTS` must be a JSON list that contains `SM_CURRENT_HOST`. "
            f"Received: SM_HOSTS={text!r}, SM_CURRENT_HOST={host!r}. Leave "
            "both as SageMaker sets them."
        ) from error
    return Place("SageMaker (SM_HOSTS, SM_CURRENT_HOST)", hosts, index)


def _from_kubernetes(
    environment: Mapping[str, str], machines: int | None
) -> Place:
    names = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"
    if any(environment.get(name) for name in names):
        hint = "Kubeflow Trainer sets it if the runtime has a torch policy."
        count, rank, first = (
            _get(environment, name, "Kubeflow Trainer", hint) for name in names
        )
        found = f"Kubeflow Trainer ({', '.join(names)})"
        hosts = _pods_of_job(first, 0, _number(names[0], count), names[2])
        return Place(found, hosts, _number(names[1], rank))
    name = "JOB_COMPLETION_INDEX"
    hint = "Set the Job's `completionMode: Indexed`."
    index = _number(name, _get(environment, name, "Kubernetes", hint))
    if machines is None:
        raise ValueError(
            "`--machines` must be given in an indexed Job, which does not set "
            f"the number of machines. Received: only {name}={index}. Pass the "
            "Job's `completions`, such as `--machines 2`."
        )
    hosts = _pods_of_job(
        socket.getfqdn(), index, machines, "The pod's host name"
    )
    return Place(f"Kubernetes ({name})", hosts, index)


def _pods_of_job(name: str, index: int, count: int, source: str) -> list[str]:
    """Return the names of all pods of a job, given the name of one pod."""
    match = re.fullmatch(rf"(.+)-{index}(\..+)", name)
    if match is None:
        raise ValueError(
            f"{source} must be NAME-{index}.SUBDOMAIN. Received: {name}. Use "
            "a Kubeflow `TrainJob`; or an indexed Job, and set the pods' "
            "`subdomain` to the name of a headless Service that selects them. "
            "The folder docs/launch has examples."
        )
    return [f"{match[1]}-{i}{match[2]}" for i in range(count)]


def _from_slurm(environment: Mapping[str, str], machines: int | None) -> Place:
    hint = "Start the launcher with `srun`, not in the batch script itself."
    names = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"
    nodes, counts, rank = (_get(environment, n, "Slurm", hint) for n in names)
    index = _number(names[2], rank)
    try:
        hosts, tasks = expand_hosts(nodes), expand_counts(counts)
        pairs = list(zip(hosts, tasks, strict=True))
    except ValueError as error:
        raise ValueError(
            f"`{names[0]}` and `{names[1]}` must be lists of equal length, as "
            f"Slurm writes them. Received: {nodes!r} and {counts!r}. Leave "
            "both as Slurm sets them."
        ) from error
    # With Slurm's `block` distribution, a node's tasks have consecutive ranks.
    places = [(host, i, n) for host, n in pairs for i in range(n)]
    is_known = index < len(places)  # Otherwise, `find_place` raises an error.
    _, local, count = places[index] if is_known else ("", 0, 1)
    reported = environment.get("SLURM_LOCALID", str(local))
    if is_known and reported != str(local):
        raise ValueError(
            "Slurm must number the tasks of a node consecutively. Received: "
            f"SLURM_LOCALID={reported} for task {index}, instead of {local}. "
            "Pass `--distribution=block` to `srun`."
        )
    found = f"Slurm ({', '.join(names)})"
    return Place(found, [host for host, *_ in places], index, local, count)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as "node[1-3,07],login"."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        # Every second piece is within brackets.
        pieces = re.split(r"\[(.*?)\]", part)
        choices = [
            _expand_ranges(piece) if i % 2 else [piece]
            for i, piece in enumerate(pieces)
        ]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_ranges(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += [str(n).zfill(len(first)) for n in numbers]
    return found


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list such as "2(x3),1"."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(part)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _get(
    environment: Mapping[str, str], name: str, platform: str, hint: str
) -> str:
    value = environment.get(name)
    if not value:
        raise ValueError(
            f"`{name}` must be set on {platform}. Received: no value. {hint}"
        )
    return value


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        remedy = "Leave it as the scheduler sets it."
        if ":" in text:  # The range of an elastic job.
            remedy = "Request a fixed number of machines."
        raise ValueError(
            f"`{name}` must be an integer >= 0. Received: {name}={text!r}. "
            f"{remedy}"
        )
    return int(text)


FINDERS: dict[str, Callable[[Mapping[str, str], Any], Place]] = {
    "tf-config": _from_tf_config,
    "vertex": _from_vertex,
    "sagemaker": _from_sagemaker,
    "kubernetes": _from_kubernetes,
    "slurm": _from_slurm,
}
# The variables by which `auto` recognizes a platform.
_SIGNS = {
    "tf-config": ["TF_CONFIG"],
    "vertex": ["CLUSTER_SPEC"],
    "sagemaker": ["SM_HOSTS", "SM_CURRENT_HOST"],
    "kubernetes": [
        "JOB_COMPLETION_INDEX",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
    ],
    "slurm": ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST"],
}
