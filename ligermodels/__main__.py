"""The command line, as `ligermodels` and as `python -m ligermodels`."""

import sys


def main() -> None:
    """Run the command line and exit; with 130 if it is interrupted, also while it is imported and built."""
    try:
        from ligermodels.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
