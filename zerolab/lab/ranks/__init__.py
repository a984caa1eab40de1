"""Live ranks in a notebook."""
