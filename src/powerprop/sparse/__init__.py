"""Sparse compute: layers that hold their active weights alone, and multiply with nothing else."""
