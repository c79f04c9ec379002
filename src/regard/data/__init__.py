"""Files to batches: sources, the decoder, preprocessing, augmentation, batches, inspection."""
