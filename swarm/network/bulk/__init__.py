"""Many bytes between two peers: frames, sockets, and sealed connections past p2pd."""
