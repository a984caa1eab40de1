"""Collectives, what the ranks agree on, and what is recorded of both."""
