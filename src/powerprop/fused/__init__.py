"""Base optimiser, virtual target, slope, masks and effective weight in one pass over memory, by compiled code."""
