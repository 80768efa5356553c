"""A model cut into stages, each a pure function of weights and input.

transformers is imported when a function first needs it: it takes seconds.
"""
