"""The learner: trains on its own, sends outer gradients, adopts new versions."""
