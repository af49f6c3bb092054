"""`diloco report`: a run in figures and one page."""
