"""Loops of other frameworks: parameters are arrays in host memory; JAX only synchronizes them."""
