"""The experiments of the paper, one file for each family; `cli.EXPERIMENTS` says where each is."""
