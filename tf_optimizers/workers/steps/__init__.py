"""Runs steps of Keras models, on the rows that each replica has."""
