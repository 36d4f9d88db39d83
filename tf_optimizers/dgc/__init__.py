"""Computes DGCMomentum."""
