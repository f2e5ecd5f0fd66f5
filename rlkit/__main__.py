"""`python -m rlkit`: the command line."""

from rlkit.cli import app

app()
