"""The documentation; a package for the sake of `docs.generate`."""
