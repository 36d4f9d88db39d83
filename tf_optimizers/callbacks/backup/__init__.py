"""Backs up and resumes runs."""
