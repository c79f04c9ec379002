"""A trained run to predictions."""
