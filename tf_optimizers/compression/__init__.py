"""Sends the largest entries of gradients, and keeps the others for later."""
