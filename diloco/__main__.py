"""`python -m diloco`, as the `diloco` command."""

from diloco.start import main

if __name__ == "__main__":
    main()
