"""Loops of other frameworks: parameters as arrays of the host, JAX for synchronization alone."""
