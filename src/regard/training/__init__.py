"""Batches to a run folder."""
