"""Compares workers between steps, and detects deadlocks during steps."""
