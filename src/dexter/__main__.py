"""`python -m dexter` is the same as `dexter`."""

from dexter.cli.main import main

if __name__ == "__main__":
    main()
