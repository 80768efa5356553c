"""What was found on a machine, judged: what keeps it from taking part, and the remedy. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from swarm.core.owner.guest import GIB

MAX_SKEW_S = 3.0
"""Records and leases further ahead are refused."""
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_DISK_BYTES = 2 * GIB
CONTAINER_NETWORKS = tuple(ipaddress.ip_network(text) for text in ("172.17.0.0/16", "10.88.0.0/16", "192.168.122.0/24"))
"""Bridges of docker, podman and libvirt: no other machine is there."""


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    says: str
    remedy: str = ""
    """What to do; empty when all is well."""


@dataclass(frozen=True)
class Dialled:
    """What dialling an address came to, by p2pd and by py-libp2p."""

    address: str
    p2pd_error: str | None
    """None: not tried."""
    libp2p_error: str | None
    ping_ms: float = 0.0


def seed(dialled: Dialled) -> Finding:
    """Of one of the run's addresses."""
    name, address = "seed", dialled.address
    p2pd, libp2p = dialled.p2pd_error, dialled.libp2p_error
    if p2pd is None and libp2p is None:
        return Finding(name, Level.WARNING, f"{address}: not dialled in time", "try again when this machine is idle")
    if not p2pd and not libp2p:
        return Finding(name, Level.OK, f"{address} answers in {dialled.ping_ms:.0f} ms")
    if not libp2p:
        return Finding(
            name,
            Level.PROBLEM,
            f"{address} answers py-libp2p but not p2pd: {p2pd}",
            "start again in a moment: p2pd waits before it dials a failed address again; then report this as a bug",
        )
    if not p2pd and p2pd is not None:
        return Finding(
            name, Level.WARNING, f"{address} answers p2pd but not py-libp2p: {libp2p}", "none needed to train"
        )
    if "refused" in libp2p:
        remedy = "ask the host whether the run is up, and for its present line: nothing listens at that port"
    elif "secur" in libp2p or "negotiate" in libp2p:
        remedy = "ask the host for its present line: something else, or another identity, answers there"
    else:
        remedy = "look at this machine's connection and firewall (outbound TCP to that port), then ask the host"
    return Finding(name, Level.PROBLEM, f"{address}: {libp2p}", remedy)


def announced(addresses: Sequence[str], dial_errors: Mapping[str, str], sees_us_at: Sequence[str]) -> list[Finding]:
    """Of where this peer would listen; `sees_us_at`: whence seeds see it that cannot dial it there."""
    name, found = "listening", []
    hosts = {address: _ip(address) for address in addresses}
    outside = {address: ip for address, ip in hosts.items() if ip is not None and not ip.is_loopback}
    for address, error in sorted(dial_errors.items()):
        if error and address in outside:
            found.append(
                Finding(
                    name,
                    Level.PROBLEM,
                    f"{address} cannot be dialled from this machine itself: {error}",
                    "open the port in this machine's firewall, or name another interface with --listen ADDRESS:PORT",
                )
            )
    if not outside:
        only_local = all(ipaddress.ip_address(seen).is_loopback for seen in sees_us_at) and bool(sees_us_at)
        found.append(
            Finding(
                name,
                Level.OK if only_local else Level.PROBLEM,
                "only this machine itself can dial this peer"
                + (", as the host can: it runs here" if only_local else ""),
                "" if only_local else "listen at an interface that others reach: --listen :PORT",
            )
        )
        return found
    bridges = [str(ip) for ip in outside.values() if any(ip in net for net in CONTAINER_NETWORKS if ip.version == 4)]
    if bridges:
        found.append(
            Finding(
                name,
                Level.WARNING,
                f"{', '.join(bridges)} is announced, the bridge of containers or virtual machines here",
                "name the interface that others reach: --listen ADDRESS:PORT",
            )
        )
    public = [str(ip) for ip in outside.values() if ip.is_global]
    elsewhere = sorted({seen for seen in sees_us_at if ipaddress.ip_address(seen) not in outside.values()})
    elsewhere = [seen for seen in elsewhere if not ipaddress.ip_address(seen).is_loopback]
    if elsewhere and not public:
        found.append(
            Finding(
                name,
                Level.WARNING,
                f"the seeds see this machine at {', '.join(elsewhere)}, a router's address: strangers cannot dial it",
                "forward a TCP port to this machine in the router and join with --listen :PORT; without it the "
                "peer still calls others",
            )
        )
    if not any(finding.level is Level.PROBLEM for finding in found):
        shown = ", ".join(str(ip) for ip in outside.values())
        found.append(Finding(name, Level.OK, f"this peer can be dialled at {shown}"))
    return found


def reach(host: str, answers: bool, refusal: str) -> Finding:
    """Whether the run's host could dial this peer at `host`, in words; `refusal`: why it relays for nobody, empty if it
    does."""
    if answers:
        return Finding("reach", Level.OK, f"reachable: the host dialled this machine back at {host}")
    how = "relayed: through the host's relay" if not refusal else f"outbound only: {refusal}"
    return Finding(
        "reach",
        Level.WARNING if refusal else Level.OK,
        f"{how}; the host cannot dial this machine at {host}",
        "none needed to train; peers that cannot be dialled either do not reach this one" if refusal else "",
    )


def clock(offset_s: float | None, error_s: float) -> Finding:
    """Of this clock against the host's: ahead by `offset_s`, give or take `error_s`."""
    if offset_s is None:
        return Finding("clock", Level.WARNING, "not compared: no seed answered", "reach a seed first")
    says = f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} the host's, give or take {error_s:.1f} s"
    if abs(offset_s) - error_s > MAX_SKEW_S:
        remedy = "set it by the network: timedatectl set-ntp true (Linux), or Date & Time in the settings"
        return Finding("clock", Level.PROBLEM, says, remedy)
    return Finding("clock", Level.OK, says)


def identity(peer_id: str, *, runs_here: bool, answers_elsewhere: bool | None) -> Finding:
    """Of this machine's key; `answers_elsewhere`: whether somebody with it answered, None if it was not asked."""
    if answers_elsewhere and not runs_here:
        return Finding(
            "identity",
            Level.PROBLEM,
            f"another machine already runs as {peer_id}",
            "end one of them; give this one an identity of its own by another --dir",
        )
    here = ", running here" if runs_here else ""
    return Finding("identity", Level.OK, f"{peer_id}{here}")


def room(what: str, free_bytes: int, limit_bytes: int | None, needed_bytes: int | None, option: str) -> Finding:
    """Of memory or disk; `needed_bytes` of the run's smallest stage, by each peer; None if no run is known."""
    allowed = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)
    least = needed_bytes or (LEAST_MEMORY_BYTES if what == "memory" else LEAST_DISK_BYTES)
    of_what = "the run's smallest stage" if needed_bytes is not None else "even a small run"
    says = f"{allowed / GIB:.1f} GiB of {what} may be used, {of_what} needs {least / GIB:.1f}"
    if allowed >= least:
        return Finding(what, Level.OK, says)
    limited = limit_bytes is not None and limit_bytes < free_bytes
    remedy = f"allow more: swarm config {option} {least / GIB + 0.1:.1f}" if limited else f"free some {what}"
    return Finding(what, Level.PROBLEM, says, f"{remedy}, or join a run with smaller stages")


def dependencies(wrong: Sequence[str], kernels_of: Sequence[str]) -> list[Finding]:
    """`wrong`: requirements that are not met; `kernels_of`: distributions that own the import name `kernels`."""
    found = []
    if wrong:
        remedy = "install into an environment of its own: python -m venv swarm && swarm/bin/pip install homeswarm"
        found.append(Finding("dependencies", Level.PROBLEM, "; ".join(wrong), remedy))
    others = sorted(set(kernels_of) - {"homeswarm"})
    if others:
        says = f"the import name kernels is also that of {', '.join(others)}, which may have overwritten ours"
        remedy = f"pip uninstall {' '.join(others)}, then pip install --force-reinstall --no-deps homeswarm"
        found.append(Finding("dependencies", Level.PROBLEM, says, remedy))
    return found or [Finding("dependencies", Level.OK, "all within the ranges that were tested together")]


def gpu(asked: str, seen: Sequence[str] | None, torch_cuda: str | None, not_there: str) -> Finding:
    """`seen`: the driver's GPUs, None without a driver; `torch_cuda`: the CUDA version torch was built for;
    `not_there`: of what Triton compiles with, empty if it is all there."""
    if asked == "cpu" or (asked == "auto" and not seen):
        idle = f"; {len(seen)} could be used: swarm config gpu auto" if seen else ""
        return Finding("GPU", Level.OK, f"none is used{idle}")
    wanted = f"GPU {asked}" if asked[0].isdigit() else {"auto": "GPU 0", "all": "each GPU"}[asked]
    if not seen:
        remedy = "install NVIDIA's driver, or compute on the CPU: swarm config gpu cpu"
        says = "nvidia-smi does not answer" if seen is None else "the driver has none"
        return Finding("GPU", Level.PROBLEM, f"{wanted} is asked for, and {says}", remedy)
    named = {"auto": [0], "all": [*range(len(seen))]}
    numbers = named.get(asked) or [int(number) for number in asked.split(",")]
    if max(numbers) >= len(seen):
        remedy = f"choose of 0 to {len(seen) - 1}: swarm config gpu 0"
        return Finding("GPU", Level.PROBLEM, f"{wanted} is asked for, and there are {len(seen)}", remedy)
    names = "; ".join(f"GPU {number}: {seen[number]}" for number in numbers)
    if torch_cuda is None:
        remedy = "install torch with CUDA: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        return Finding("GPU", Level.PROBLEM, f"{names}, but torch here is built without CUDA", remedy)
    if not_there:
        says = f"{names}; activations are encoded on the CPU, which is slower, for {not_there} is missing"
        return Finding("GPU", Level.WARNING, says, "sudo apt install gcc python3-dev, or the like on your system")
    more = f"; {len(seen) - 1} more could be used: swarm config gpu all" if asked == "auto" and len(seen) > 1 else ""
    return Finding("GPU", Level.OK, f"{names}; torch for CUDA {torch_cuda}{more}")


def congestion(control: str | None) -> Finding:
    """Of TCP's default; None where the system does not say. A loss-based one takes each lost packet for a full line."""
    if control is None or control.startswith("bbr"):
        return Finding("TCP", Level.OK, f"its congestion control is {control or 'not told here'}")
    says = f"its congestion control is {control}; bbr carries more over lines that lose packets"
    return Finding("TCP", Level.OK, f"{says}: sudo sysctl -w net.ipv4.tcp_congestion_control=bbr")


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    parts = address.split("/")
    try:
        return ipaddress.ip_address(parts[2]) if parts[1] in ("ip4", "ip6") else None
    except (ValueError, IndexError):
        return None
