"""How a round's large records travel, decided."""
