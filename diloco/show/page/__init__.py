"""A run on one page: live, and as one file that is kept."""
