"""The decisions of a swarm of thousands under a virtual clock: `swarm simulate`. No tensors, no messages, no torch.

outcome = simulate(read_scenario(Path("examples/scenarios/home_fleet.toml")))
"""
