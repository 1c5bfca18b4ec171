"""Every method of continual learning on one benchmark: the table of class-incremental learning, and the scenarios."""
