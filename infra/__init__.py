"""What operators deploy beside the daemons."""
