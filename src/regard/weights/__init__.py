"""Other people's checkpoints and modules, in and out."""
