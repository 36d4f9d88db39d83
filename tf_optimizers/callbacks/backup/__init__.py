"""Backs up runs, and resumes them."""
