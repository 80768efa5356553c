"""Tests of README's figures."""
