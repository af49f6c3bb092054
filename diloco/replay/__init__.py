"""A run's past: made again, decided again, and under other settings."""
