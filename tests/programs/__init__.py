"""Random programs whose results must not depend on the number of workers."""
