"""A batch of images to logits."""
