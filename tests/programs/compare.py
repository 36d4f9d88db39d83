"""Compares a program's results on several workers with one process."""

import fnmatch
import re

import numpy as np

from .reasons import known, tolerance

# Outcomes that are not failures.
FINE = ("agreed", "refused", "skipped")
HOUSE = re.compile(r"\bmust\b|\bneeds?\b|\bcannot\b|\btakes (no|one)\b")
HOUSE_END = re.compile(r" Received\b|[.:] ")
# How much larger than the effect of a rounding error in the data a difference
# may be: a step makes many rounding errors.
MANY = 10
DIVERGED = 1e15  # Larger weights than `huge` data give without divergence.
HOUSE_CLASSES = {"ValueError", "TypeError", "RuntimeError"}
# For checks in a running graph, TensorFlow raises its own class.
IN_GRAPH = re.compile(
    r"assertion failed: \[(All workers|A prediction) must .* Received: "
)


class Outcome:
    """The outcome of a program: its kind, and details.

    Args:
        kind: "agreed", "refused", "skipped", or a kind of failure.
        detail: A text that helps to find the reason.
        signature: The same text for similar failures.
    """

    def __init__(self, kind, detail="", signature=""):
        self.kind, self.detail = kind, detail
        self.signature = f"{kind}: {signature}"
        self.failed = kind not in FINE
        self.cpu = 0.0

    def is_like(self, other):
        """Return whether both fail, with the same error if any."""
        return self.failed and kind_of(self) == kind_of(other)


def kind_of(outcome):
    """Return the part that must not change while a program is shrunk."""
    return outcome.signature if "error" in outcome.kind else outcome.kind


def judge(program, reference, results, nudged=()):
    """Return the outcome of a program.

    Args:
        program: The program.
        reference: The result of one process.
        results: The results of all workers; None for missing ones.
        nudged: Results of one process whose data have rounding errors. What
            these change as much as workers do is not compared.
    """
    if reference is None or reference["error"]:
        error = reference["error"] if reference else {"traceback": "crashed"}
        return Outcome("skipped", error["traceback"])
    if None in results:
        there = [index for index, r in enumerate(results) if r is not None]
        words = "".join(
            r["error"]["traceback"][-1500:]
            for r in results
            if r is not None and r["error"]
        )
        detail = f"Only workers {there} have ended.\n{words}"
        return Outcome("hang or crash", detail, essence(words))
    if any(result["error"] for result in results):
        return judge_errors(program, results)
    for look in (differing_replicas, differing_workers):
        if found := look(program, results):
            return Outcome("replicas differ", found, essence(found))
    if overflows_elsewhere(program, reference, results[0]):
        return Outcome("skipped", "The rows of a sum decide what overflows.")
    if found := differences(program, reference, results[0]):
        found = {
            key: value
            for key, value in found.items()
            if not is_unstable(key, results[0], reference, nudged)
        }
        if not found:
            text = "Rounding errors in the data change it as much."
            return Outcome("skipped", text, "rounding")
        text = "\n".join(f"{key}: {value}" for key, value in found.items())
        return Outcome("differs", text, " ".join(sorted(map(essence, found))))
    return Outcome("agreed")


def overflows_elsewhere(program, reference, result):
    """Return whether only one of two results has skipped steps.

    This needs a scaled loss, and no value that overflows intentionally. If
    weights have diverged, they cause the overflow.
    """
    weights = reference.get("left", {}).get("weights", [])
    scales, others = (
        part.get("left", {}).get("scales", []) for part in (reference, result)
    )
    return (
        program["precision"] in ("mixed_float16", "float16")
        and (
            program["scale"] not in ("huge", "one row")
            or any(np.any(np.abs(each) > DIVERGED) for each in weights)
        )
        and len(scales) == len(others)
        and scales != others
    )


def is_unstable(key, result, reference, nudged):
    """Return whether rounding errors in the data change a value as much."""
    one, expected, *others = (
        _flat(each["seen"]).get(key) for each in (result, reference, *nudged)
    )
    if not _are_comparable(one, expected):
        return False
    changes = [
        _by(each, expected) for each in others if _are_comparable(each, one)
    ]
    return _by(one, expected) <= MANY * max(changes, default=0.0)


def _are_comparable(one, other):
    """Return whether two values are numbers of one shape."""
    arrays = [np.asarray(each) for each in (one, other)]
    return np.shape(one) == np.shape(other) and not any(
        array.dtype.kind in "USO" for array in arrays
    )


def essence(text):
    """Return the last line of a text, without parts that vary."""
    lines = text.strip().splitlines() or [""]
    short = re.sub(r"0x\w+|\d+(\.\d+)?(e-?\d+)?|'[^']*'", "#", lines[-1])
    return short[:160].strip()


def judge_errors(program, results):
    """Return the outcome of a program that some workers could not run."""
    errors = [result["error"] for result in results]
    texts = "\n".join(
        f"Worker {index}: {error['traceback'][-3000:] if error else 'none'}"
        for index, error in enumerate(errors)
    )
    first = next(error for error in errors if error)
    line = (first["text"].strip().splitlines() or [""])[0]
    signature = f"{first['class']} {essence(line)}"
    if None in errors:
        return Outcome("error on some workers", texts, signature)
    if any("Received nothing from worker" in e["text"] for e in errors):
        return Outcome("hang or crash", texts, signature)
    if not all(is_in_house_form(error) for error in errors):
        return Outcome("error", texts, signature)
    if len({(e["class"], essence(rule_of(e["text"]))) for e in errors}) > 1:
        return Outcome("different errors", texts, signature)
    if changed := changes(results):
        return Outcome("changed before the error", changed + texts, signature)
    return Outcome("refused", first["text"], signature)


def rule_of(text):
    """Return the first sentence of an error; others may name a worker."""
    return HOUSE_END.split(text.strip().partition("\n")[0])[0]


def is_in_house_form(error):
    """Return whether our code raised an error that states a rule."""
    stated = HOUSE.search(error["text"]) is not None
    if error["class"] == "InvalidArgumentError":
        in_graph = IN_GRAPH.search(error["text"]) is not None
        return in_graph or (stated and error["ours"])
    has_class = HOUSE_CLASSES & set(error["classes"])
    return (
        bool(has_class)
        and stated
        and "Received" in error["text"]
        and (error["ours"] or "tf_optimizers" in error["traceback"])
    )


def changes(results):
    """Return the weights that changed despite an error, or nothing.

    Integers may differ between workers: they cannot be averaged.
    """
    first, *_ = lefts = [
        [
            weight
            for weight in result.get("left", {"weights": []})["weights"]
            if weight.dtype.kind not in "iu"
        ]
        for result in results
    ]
    for index, (result, left) in enumerate(zip(results, lefts, strict=True)):
        if not _same(left, first):
            return f"Worker {index} is left with weights of its own.\n"
        notes = [
            value
            for key, value in result["seen"].items()
            if key == "start" or key.startswith("weights")
        ]
        steps = result.get("left", {"steps": []})["steps"]
        if len(notes) == 1 and steps == [0] and not _same(left, notes[0]):
            return f"Worker {index} has changed weights.\n"
    return ""


def _same(ones, others):
    return len(ones) == len(others) and all(
        np.array_equal(one, other, equal_nan=may_be_nan(one))
        for one, other in zip(ones, others, strict=True)
    )


def may_be_nan(array):
    """Return whether an array has floats, including those that NumPy lacks."""
    dtype = np.asarray(array).dtype
    return np.issubdtype(dtype, np.inexact) or dtype.name == "bfloat16"


def differing_replicas(program, results):
    """Return the first variable that differs between replicas, if any."""
    if "replicas" in known(program):
        return ""
    told = warnings_of(results)
    # By position: names differ on a worker with another model.
    first = list(results[0]["replicas"].values())
    for index, result in enumerate(results):
        if len(result["replicas"]) != len(first):
            return f"worker {index} has other variables"
        pairs = zip(result["replicas"].items(), first, strict=True)
        for (name, locals_), (expected, *_) in pairs:
            if f"`{name.partition(' ')[2]}`" in told:
                continue
            for device, local in enumerate(locals_):
                if not _same([local], [expected]):
                    by = _by(local, expected)
                    return (
                        f"worker {index}, device {device} by {by:.2g}: {name}"
                    )
    return ""


def warnings_of(results):
    """Return the warnings about variables without a mean."""
    return "\n".join(
        text
        for result in results
        for text in result.get("warnings", ())
        if text.startswith("Variables to which replicas assign")
    )


def differing_workers(program, results):
    """Return results that differ between workers, if any."""
    is_own = "replicas" in known(program) or warnings_of(results)
    own = ("weights", "loaded", "copied") if is_own else ()
    for index, result in enumerate(results[1:], 1):
        found = _compare(result["seen"], results[0]["seen"], 1e-6, own)
        if found:
            key, value = next(iter(found.items()))
            return f"worker {index}, {value}: {key}"
    return ""


def differences(program, reference, result):
    """Return the differences between a worker's result and one process."""
    return _compare(
        result["seen"], reference["seen"], tolerance(program), known(program)
    )


def _compare(seen, expected, limit, ignored):
    found = {}
    seen, expected = _flat(seen), _flat(expected)
    for key in {**expected, **seen}:
        if any(fnmatch.fnmatch(key, f"{name}*") for name in ignored):
            continue
        if key not in seen or key not in expected:
            found[key] = "is missing" if key not in seen else "is new"
            continue
        one, other = np.asarray(seen[key]), np.asarray(expected[key])
        if one.shape != other.shape:
            found[key] = f"has shape {one.shape} instead of {other.shape}"
        elif one.dtype.kind in "USO" or other.dtype.kind in "USO":
            if one.tolist() != other.tolist():
                found[key] = f"is {one.tolist()!r}, not {other.tolist()!r}"
        elif key.endswith("share"):
            if np.any(one - other > 0.5):
                found[key] = f"is {one}, not {other}"
        elif not _close(one, other, limit):
            by = _by(one, other)
            text = f"is off by {by:.2g}"
            if one.size < 5:
                text += f": {one.tolist()} instead of {other.tolist()}"
            found[key] = text
    return found


def _close(one, other, limit):
    return np.allclose(
        one.astype("float64"),
        other.astype("float64"),
        rtol=10 * limit,
        atol=limit,
        equal_nan=True,
    )


def _by(one, other):
    """Return the largest difference; it is infinite where only one is NaN."""
    one, other = (np.asarray(each).astype("float64") for each in (one, other))
    with np.errstate(invalid="ignore"):
        by = np.abs(one - other)
    by = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, by)
    return float(np.max(np.nan_to_num(by, nan=np.inf), initial=0.0))


def _flat(value, name=""):
    """Return the arrays in a nest, by path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)) and not all(
        isinstance(part, (int, float)) for part in value
    ):
        items = enumerate(value)
    else:
        return {name.strip(): value}
    found = {}
    for key, part in items:
        found |= _flat(part, f"{name} {key}")
    return found
