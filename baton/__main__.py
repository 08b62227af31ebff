"""`python -m baton` and the script `baton` are the `baton` command."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while modules are imported ends the process with exit code 130."""
    try:
        from baton.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
