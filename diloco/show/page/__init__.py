"""A run on one page: served live, or saved as one file."""
