"""A run's past: recomputed, decided again, and merged under other settings."""
