"""`python -m rlkit`: the command line."""

from rlkit.console import main

main()
