"""Trackers: a run's figures in TensorBoard or Weights & Biases, read from its tape."""
