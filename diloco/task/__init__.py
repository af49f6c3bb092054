"""A task, tried before anything depends on it."""
