"""Shows a run to people: on a terminal, on a web page, in trackers, and by alerts."""
