"""The experiments of the paper, one file for each family; `catalogue` says where each is."""
