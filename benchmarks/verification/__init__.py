"""What lies change, how soon they are found, and what verification costs."""
