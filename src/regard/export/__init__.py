"""A trained run to one exported file, proven equal."""
