"""Continual generative modelling: ten characters in one variational autoencoder (table 3, appendix C)."""
