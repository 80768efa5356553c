"""The simulators, held against real swarms."""
