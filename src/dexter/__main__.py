"""`python -m dexter` is the same as `dexter`."""

from dexter.cli import main

if __name__ == "__main__":
    main()
