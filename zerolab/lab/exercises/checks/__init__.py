"""The checks, a file for each lesson."""
