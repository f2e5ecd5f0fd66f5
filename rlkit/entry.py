"""The `rlkit` command. Nothing is imported before Ctrl-C has one meaning: a line, and a shell's exit code for it."""

import sys

# What a shell expects of a program that Ctrl-C ended: 128 + SIGINT (rlkit.cli_errors, which takes a while to import).
INTERRUPTED = 130


def main() -> None:
    """Import and run the command line."""
    try:
        from rlkit.cli import app

        app()
    except KeyboardInterrupt:
        print("rlkit: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
