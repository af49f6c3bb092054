"""A file, tried before anything depends on it: `diloco check`."""
