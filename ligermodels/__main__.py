"""`python -m ligermodels`: the command line."""

from ligermodels.cli import main

if __name__ == "__main__":
    main()
