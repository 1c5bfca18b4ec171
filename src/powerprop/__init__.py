"""Powerpropagation for PyTorch."""
