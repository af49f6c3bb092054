"""`diloco watch`: sends a run's problems to people, with no service but a webhook."""
