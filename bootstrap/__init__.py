"""The host: prepares a run, seeds the DHT, admits peers, keeps the ledger, archives checkpoints."""
