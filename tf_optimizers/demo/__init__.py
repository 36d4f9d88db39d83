"""The demo: `python -m tf_optimizers.demo` trains on real data and reports."""
