"""Models to train: the built-in one, decoders, their data, loops of other frameworks."""
