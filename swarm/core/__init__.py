"""Every decision of the swarm as pure typed objects: standard library only, no clock, no I/O."""
