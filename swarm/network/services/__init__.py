"""gRPC and HTTP: the host's service to strangers, its and the daemon's local ones, the host's page, mirrors."""
