"""Base optimiser, virtual target, slope, masks and effective weight in one pass over memory, compiled where it can be."""
