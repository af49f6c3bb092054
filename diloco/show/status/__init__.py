"""`diloco status`."""
