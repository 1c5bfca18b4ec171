"""The sparse-training methods side by side."""
