"""`diloco dashboard`: a run on one page, as it goes."""
