"""The demo: `python -m tf_optimizers.demo` trains on real data and reports.

Each of its parts has a folder. Notebooks and benchmarks use `data`, `images`,
`plots`, `results`, `sockets` and `trainer`, and nothing else of it.
"""
