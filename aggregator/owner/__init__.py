"""The owner of one fragment: it feeds the machine of `core`, and carries out what that asks for."""
