"""How many bytes this machine's processes have sent to each other."""

from pathlib import Path

INTERFACE = "lo"
COUNTERS = Path("/proc/net/dev")

# The kernel's columns: 8 of what was received, then those of what was sent.
_SENT_BYTES = 8


def sent_bytes(
    counters: Path = COUNTERS, interface: str = INTERFACE
) -> int | None:
    """Return what an interface has sent since the machine started.

    Headers of packets and the traffic of all programs are part of it.

    Args:
        counters: The kernel's table of interfaces.
        interface: Loopback, unless told otherwise.

    Returns:
        Bytes, or None where the kernel has no such table (macOS).
    """
    try:
        lines = counters.read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[_SENT_BYTES])
    return None
