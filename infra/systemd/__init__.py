"""Units of systemd; `diloco install-units` writes them to a machine."""
