"""Shares data among replicas: rows, their order, and what is known of them."""
