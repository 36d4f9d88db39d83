"""Encodes entries in few bits: their values, and their positions."""
