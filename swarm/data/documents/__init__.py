"""Documents in a token file: conversations, what of them is learnt, and how they are packed into samples."""
