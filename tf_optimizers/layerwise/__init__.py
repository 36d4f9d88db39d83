"""Keeps the state of Lamb and LANS, and steps."""
