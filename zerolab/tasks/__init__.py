"""The models (models.py) and the data (data.py) that lessons, demo, bench and train share."""
