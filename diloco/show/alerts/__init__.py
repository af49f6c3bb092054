"""`diloco watch`: tells people of a run's problems, on the terminal and by a webhook."""
