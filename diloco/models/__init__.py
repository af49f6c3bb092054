"""What is trained: the built-in model, decoders, their data, loops of other frameworks."""
