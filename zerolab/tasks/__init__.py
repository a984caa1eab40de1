"""The models and data that lessons, demo, bench and train share."""
