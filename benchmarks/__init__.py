"""Measurements, each a program; threads of compute libraries sleep while they wait, unless the environment speaks."""

from swarm.local.compute_pools import wait_asleep

wait_asleep()  # read once, when torch is first imported: before any module here is
