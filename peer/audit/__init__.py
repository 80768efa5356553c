"""A suspicion at a peer: what it draws, shows, judges and proves."""
