"""The operator's command; see `diloco --help`."""
