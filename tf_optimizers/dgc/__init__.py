"""Keeps the momentum of DGCMomentum, and accumulates in it."""
