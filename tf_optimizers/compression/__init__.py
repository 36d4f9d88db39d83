"""Selects the entries of a gradient to send, and keeps the rest."""
