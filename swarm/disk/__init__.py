"""Files that are whole or not there, and disks that are full."""
