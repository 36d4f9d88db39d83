"""Lets workers of tests start in three quarters of the time.

They collect garbage rarely, and Keras finds neither scikit-learn nor
Matplotlib, which it loads where it can. Python runs this when a process starts
that has this folder in `PYTHONPATH`.
"""

import gc
import sys

gc.set_threshold(100_000, 50, 100)
sys.modules |= dict.fromkeys(["matplotlib", "sklearn"])
