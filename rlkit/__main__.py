"""`python -m rlkit`: the command line."""

from rlkit.entry import main

main()
