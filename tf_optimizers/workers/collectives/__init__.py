"""Sends values between replicas: in few messages, in one order, and watched."""
