"""The host as judge: evidence, states that are stated, newcomers and debts."""
