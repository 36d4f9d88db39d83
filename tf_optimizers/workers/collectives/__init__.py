"""Exchanges values between replicas in few rounds, and in a fixed order."""
