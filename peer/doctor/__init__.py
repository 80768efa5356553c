"""`swarm doctor`: a machine looked at, and what was found judged."""
