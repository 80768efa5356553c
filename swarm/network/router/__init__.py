"""The home's router: ports that it is asked to forward to this machine."""
