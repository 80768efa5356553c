"""Who is where: the directory over the DHT, its records and its time, and who can be dialled."""
