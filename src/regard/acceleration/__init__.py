"""Other projects' models with our attention, and back."""
