"""The parts of the demo, and its settings."""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tf_optimizers.demo.link import Link

# Each part's folder has a module that does the work, and one for the report:
#   ..._study.run(settings, progress) -> result
#   ..._report.table(result) -> rich.table.Table
#   ..._report.section(result, folder) -> Markdown
PARTS = {
    "large-batch": "large_batch.batch",
    "gradient-compression": "gradient_compression.compression",
    "offload": "offload.offload",
}

# Packages of the `demo` extra: {name to import: name to install}.
EXTRAS = {
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
    "importlib_resources": "importlib-resources",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}


# Learning rates are chosen with this seed and later ones.
FIRST_TUNING_SEED = 10_001


@dataclass(frozen=True)
class Settings:
    """The settings from the command line.

    Args:
        seeds: int >= 2. The number of networks to train for each test
            accuracy. Slow parts may train fewer.
        first_seed: int >= 0. The first of the consecutive seeds.
        link: The simulated link between workers.
        quick: Whether to run at a reduced size.
        data_dir: Folder of the dataset, written if missing.
        report_dir: Folder of the report.
    """

    seeds: int
    first_seed: int
    link: Link
    quick: bool
    data_dir: Path
    report_dir: Path


def load_part(name: str) -> tuple[ModuleType, ModuleType]:
    """Import a part's two modules, which is slow."""
    modules = f"tf_optimizers.demo.{PARTS[name]}"
    study, report = (
        importlib.import_module(f"{modules}_{module}")
        for module in ("study", "report")
    )
    return study, report


def missing_extras() -> list[str]:
    """Return the packages of the `demo` extra that are not installed."""
    return [
        package
        for module, package in EXTRAS.items()
        if importlib.util.find_spec(module) is None
    ]
