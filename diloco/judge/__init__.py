"""A run's health: the invariants held against tape and store, and `diloco doctor`."""
