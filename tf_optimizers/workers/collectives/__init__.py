"""Exchanges values between replicas, in few messages and in one order."""
