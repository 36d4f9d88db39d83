"""The base of all optimizers: gradients, averages, precision, exclusions."""
