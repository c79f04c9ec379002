"""Side by side with peers: `python -m benchmarks.attend`, `.pixel`, `.vit`."""
