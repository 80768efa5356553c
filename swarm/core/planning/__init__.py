"""What a planned run is worth beside one of its machines alone, and which mode of training suits a fleet."""
