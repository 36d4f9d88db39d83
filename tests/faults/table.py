"""The trials as a table of Markdown."""

import statistics


def make(trials):
    """Return one line per case, in the order of their first trial."""
    lines = [
        "| fault | trials | as expected | detected after, s "
        "| training again after, s | steps repeated | final weights |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for case in dict.fromkeys(trial["case"] for trial in trials):
        found = [trial for trial in trials if trial["case"] == case]
        if "skipped" in found[0]:
            lines.append(f"| {case} | 0 | {found[0]['skipped']} | | | | |")
            continue
        passed = sum(trial["passed"] for trial in found)
        equal = sum(trial["weights_equal"] for trial in found)
        lines.append(
            f"| {case} | {len(found)} | {passed} "
            f"| {_spread(found, 'detected')} | {_spread(found, 'resumed')} "
            f"| {_spread(found, 'steps_lost')} "
            f"| {f'bit-equal in {equal}' if equal else 'ended by an error'} |"
        )
    return "\n".join(lines)


def _spread(trials, key):
    """Return the median of a figure, and its range."""
    values = [t[key] for t in trials if t.get(key) is not None]
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:g}"
    low, high = min(values), max(values)
    return f"{statistics.median(values):g} ({low:g}-{high:g})"
