"""Tools that operators deploy beside the daemons."""
