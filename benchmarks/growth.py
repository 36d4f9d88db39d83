"""How does a step's cost grow with the number of variables and parameters?

    python benchmarks/growth.py [--rounds 11]

Works like step_time.py, for square variables: 4 M parameters in more and more
variables, and one variable with more and more parameters.
"""

import results
import step_time
import tables

import tf_optimizers as tfo

SHARED = 2048  # In "variables, ...", all variables together have SHARED**2.
MODELS = {
    f"variables, {count**2}": count**2 * [(SHARED // count, SHARED // count)]
    for count in (1, 4, 8, 16)
} | {f"parameters, {side**2}": [(side, side)] for side in (64, 256, 1024, 4096)}


def main() -> None:
    arguments = results.options(__file__, __doc__, rounds=11).parse_args()
    for name, shapes in MODELS.items():
        contenders = {
            tables.YARDSTICK: step_time.yardstick_step,
            "tfo.Lamb": step_time.optimizer_step(tfo.Lamb()),
            "tfo.LANS": step_time.optimizer_step(tfo.LANS(weight_decay=0.01)),
            "tfo.AdamOffload": step_time.optimizer_step(tfo.AdamOffload()),
        }
        result = step_time.measure(name, shapes, contenders, arguments.rounds)
        results.record(arguments.output, name, result)


if __name__ == "__main__":
    main()
