"""The demo: `python -m tf_optimizers.demo` trains on real data and reports.

Each part has a folder. Notebooks and benchmarks use only `data`, `images`,
`plots`, `results`, `sockets` and `trainer`.
"""
