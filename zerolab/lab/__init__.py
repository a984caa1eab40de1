"""What a classroom needs: small models, real text, plots and the demonstration. Not imported by the engine."""
