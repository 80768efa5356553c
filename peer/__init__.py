"""The volunteer's daemon: carries out, on a real clock, a real network and a real disk, what `swarm.core` decides."""
