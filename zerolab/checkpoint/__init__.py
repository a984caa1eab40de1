"""Checkpoints that any stage at any world size can load."""
