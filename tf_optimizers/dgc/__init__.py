"""The mathematics of DGCMomentum."""
