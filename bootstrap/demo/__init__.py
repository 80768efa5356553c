"""`swarm demo`: a whole swarm on one machine, made of the programs that volunteers and hosts run, and watched."""
