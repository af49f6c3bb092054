"""`diloco plan`: what to expect of a fleet."""
