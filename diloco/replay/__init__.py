"""Recomputes a run's past: verifies it, decides it again, or merges it under other settings."""
