"""A run shown to people: status, page, trackers, alerts."""
