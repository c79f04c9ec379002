"""What a model attends to: recording, health, relevance, maps."""
