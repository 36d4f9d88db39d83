"""Runs the parts and writes `results.json` and `report.md`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from tf_optimizers.demo.parts import Settings
from tf_optimizers.demo.results import environment, write_json
from tf_optimizers.demo.start import Parts

BAR = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"


def report_on(parts: Parts, settings: Settings, console: Console) -> None:
    """Run the parts in turn, show their tables and write the report."""
    start = time.monotonic()
    results = {}
    for name, (study, _) in parts.items():
        # In a log file, each refresh adds a line, so refresh rarely.
        interval = 0.1 if sys.stderr.isatty() else 15
        with tqdm(desc=name, mininterval=interval, bar_format=BAR) as progress:
            results[name] = study.run(settings, progress)
    document = {
        "quick": settings.quick,
        "seconds": round(time.monotonic() - start, 1),
        "environment": environment(),
        "parts": results,
    }
    folder = settings.report_dir
    write_json(document, folder / "results.json")
    sections = []
    for name, (_, show) in parts.items():
        console.print(show.table(results[name]))
        sections.append(show.section(results[name], folder))
    write_report(document, sections, folder / "report.md")
    console.print(f"Report: {folder / 'report.md'}", soft_wrap=True)


def write_report(
    document: dict[str, Any], sections: Sequence[str], path: Path
) -> None:
    """Write the page that shows every part's tables and plots."""
    paragraphs = ["# Report of `python -m tf_optimizers.demo`"]
    if document["quick"]:
        paragraphs.append(
            "**This was a reduced run (`--quick`). It shows that the demo "
            "works; its numbers mean nothing.**"
        )
    env = document["environment"]
    paragraphs.append(
        f"{env['date']}; {document['seconds']:.0f} s, CPU cores: "
        f"{env['cpu_cores']}, GPUs: {env['gpus']}; Python {env['python']}, "
        f"TensorFlow {env['tensorflow']}, Keras {env['keras']}, NumPy "
        f"{env['numpy']}, tf_optimizers {env['tf_optimizers']}. All numbers, "
        "including those of the plots, are in [results.json](results.json)."
    )
    text = "\n\n".join([*paragraphs, *sections])
    path.write_text(text + "\n", encoding="utf-8")
