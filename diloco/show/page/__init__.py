"""The page of a run: served live to browsers, or saved as one HTML file."""
