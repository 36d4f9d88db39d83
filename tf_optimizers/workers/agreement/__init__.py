"""Checks that workers agree, outside of steps, and watches them in steps."""
