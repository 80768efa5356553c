"""Tests of what README and docs tell to type."""
