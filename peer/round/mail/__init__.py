"""A round's messages at a peer: small ones, large records that go once, parts in bulk."""
