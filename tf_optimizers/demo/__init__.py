"""The demo: `python -m tf_optimizers.demo` trains on real data and reports.

Each part of the demo has a folder. Notebooks and benchmarks use only the
modules `data`, `images`, `plots`, `results`, `sockets` and `trainer`.
"""
