"""`python -m swarm`: this is where the `swarm` command runs without its script."""

from swarm.cli import main

main()
