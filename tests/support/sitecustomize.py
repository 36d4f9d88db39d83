"""Lets workers of tests collect garbage rarely: imports take a fifth less.

Python runs it when a process starts that has this folder in `PYTHONPATH`.
"""

import gc

gc.set_threshold(100_000, 50, 100)
