"""A run's TOML file: its tables, checked, written, and frozen into settings."""
