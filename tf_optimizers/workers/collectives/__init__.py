"""Exchanges values between replicas in few messages, and in a fixed order."""
