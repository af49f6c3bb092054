"""`diloco watch`: a run's problems sent to people, with nothing between but a webhook."""
