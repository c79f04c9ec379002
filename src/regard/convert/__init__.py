"""Other projects' weights: key maps, conversion, verification."""
