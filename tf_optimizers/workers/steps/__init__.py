"""Runs Keras models' steps, and weights each replica by its number of rows."""
