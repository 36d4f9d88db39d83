"""Trains on two workers, with and without gradient compression."""
