"""Tasks for models: bytes, published decoders, other libraries' models; and their data."""
