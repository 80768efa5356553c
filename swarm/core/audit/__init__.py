"""Who is drawn, and from what: hash chains, what members and the host reveal of them, the beacon they make."""
