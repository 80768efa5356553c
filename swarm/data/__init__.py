"""Where tokens come from: text files become token files, token files become microbatches."""
