"""A run's health: tape and store compared with the invariants, and `diloco doctor`."""
