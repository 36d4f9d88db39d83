"""Checks between steps that workers agree, and watches them during steps."""
