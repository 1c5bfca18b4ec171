"""Robot tasks one after another: the paper's table of continual reinforcement learning."""
