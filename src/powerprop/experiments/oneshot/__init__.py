"""Train, prune once, measure: figures 2 and 3 a of the paper and its appendix A."""
