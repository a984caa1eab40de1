"""The engine: what calls the stages."""
