"""A swarm on one's own machine, and what its programs need of the machine."""
