"""Who serves which stage, and how fast strangers may ask."""
