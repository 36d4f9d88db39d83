"""Selects which part of a gradient is sent, and keeps the rest."""
