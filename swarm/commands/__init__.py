"""One module for each verb of `swarm`, imported only when the verb is used; its click command is `command`."""
