"""Sends the largest entries of gradients, and keeps the rest for later."""
