"""A run folder to something shipped: predictions, exported files."""
