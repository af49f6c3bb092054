"""Judges a run's health: compares tape and store with the protocol's rules, for `diloco doctor`."""
