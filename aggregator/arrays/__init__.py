"""One fragment's arrays: the merge, the outer step, and what both work on."""
