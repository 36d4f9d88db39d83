"""Cuts the start-up time of test workers by a quarter.

Workers collect garbage rarely, and Keras does not find scikit-learn and
Matplotlib, which it would load. Python runs this at the start of every process
with this folder in `PYTHONPATH`.
"""

import gc
import sys

gc.set_threshold(100_000, 50, 100)
sys.modules |= dict.fromkeys(["matplotlib", "sklearn"])
