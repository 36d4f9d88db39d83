"""Runs steps of Keras models, weighted by the rows of each replica."""
