"""Trackers that people use, fed from the host's ledger by threads that the host never waits for."""
