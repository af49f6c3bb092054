"""Benchmarks: each module is run by `python -m bench.NAME` and prints one table."""
