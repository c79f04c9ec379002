"""A run folder to something seen."""
