"""Lets training loops of other frameworks join runs, with parameters as arrays in host memory.

The loop trains by its framework; JAX only synchronizes the parameters.
"""
