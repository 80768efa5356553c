"""`python -m swarm`: the `swarm` command without its script."""

from swarm.cli import main

main()
