"""A run as it is now: `diloco status`, `runs`, `learners`."""
