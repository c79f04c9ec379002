"""A run folder to something shipped."""
