"""A sub-network for every task in one network: PackNet, EfficientPackNet, and which task an input is of."""
