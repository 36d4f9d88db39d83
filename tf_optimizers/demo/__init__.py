"""The demo: `python -m tf_optimizers.demo` trains on real data and reports.

Each part of the demo has a folder. Notebooks and benchmarks also use some
modules, such as `data`, `images`, `link`, `network`, `results` and `trainer`.
"""
