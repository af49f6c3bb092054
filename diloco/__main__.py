"""Runs the `diloco` command, for `python -m diloco`."""

from diloco.start import main

if __name__ == "__main__":
    main()
