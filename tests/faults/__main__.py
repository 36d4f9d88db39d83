"""What happens after a fault, and how long does it take?

    python tests/faults [--minutes 20] [--case NAME ...] [--seed S]
                        [--json FILE]

Trains on two workers repeatedly, with a fault at a random step. The first round
tries every case once, and more rounds follow while there is time. Prints a
table. Full disks and cut networks need root.
"""

import argparse
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = map(str, (HERE.parent, HERE.parent / "support", HERE.parents[1]))

from faults import soak, table  # noqa: E402


def main():
    """Try the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--case", action="append", choices=list(soak.CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    until = time.time() + 60 * options.minutes
    trials = []
    for trial in soak.run(
        options.case or list(soak.CASES), until, options.seed
    ):
        print(trial, file=sys.stderr, flush=True)
        trials.append(trial)
        if options.json:
            options.json.write_text(json.dumps(trials, indent=1) + "\n")
    print(table.make(trials))
    return 0 if all(trial["passed"] for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
