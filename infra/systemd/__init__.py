"""Units of systemd; `diloco host units` writes them to a machine."""
