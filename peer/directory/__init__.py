"""Who is there, and how a peer reaches them: other peers, the host, relays."""
