"""`diloco local`: a whole run on one machine."""
