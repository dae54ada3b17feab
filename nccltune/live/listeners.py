"""Who listens on a TCP port of this host: an older server on the same port answers for a new one.

Read from procfs. Where it does not tell (another network namespace, another user's process), the
answer is None, never a guess.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from nccltune.live.procfs import PROC_ROOT, is_exhausted, read_stat

ANY_ADDRESS = {4: ip_address("0.0.0.0"), 6: ip_address("::")}  # noqa: S104 - compared with
_LISTEN = "0A"
_SOCKET = "socket:["
_MAX_TABLE_BYTES = 8 * 2**20


def listens(pids: Iterable[int], port: int, root: Path = PROC_ROOT) -> bool | None:
    """Tell whether one of these processes listens on a port."""
    listening = frozenset(listening_sockets(root / "net", port))
    if not listening:
        return None
    is_hidden = False
    for pid in pids:
        try:
            if not listening.isdisjoint(sockets_of(pid, root)):
                return True
        except PermissionError:
            is_hidden = True
        except OSError:
            continue  # it has ended
    return None if is_hidden else False


def descendants(pid: int, root: Path = PROC_ROOT) -> list[int]:
    """Return every process below one, parents before their children."""
    children: dict[int, list[int]] = {}
    with os.scandir(root) as entries:
        for number in (int(entry.name) for entry in entries if entry.name.isdecimal()):
            if (fields := read_stat(number, root)) is not None:
                children.setdefault(int(fields[1]), []).append(number)
    found = list(children.get(pid, ()))
    for child in found:
        found.extend(children.get(child, ()))
    return found


def sockets_of(pid: int, root: Path = PROC_ROOT) -> frozenset[str]:
    """Return the inodes of a process's sockets.

    Raises:
        PermissionError: one may not look into it.
        OSError: it has ended.
    """
    found = set()
    with os.scandir(root / str(pid) / "fd") as entries:
        for entry in entries:
            try:
                target = os.readlink(entry.path)  # noqa: PTH115 - the target is no path
            except FileNotFoundError:
                continue
            if target.startswith(_SOCKET):
                found.add(target.removeprefix(_SOCKET).removesuffix("]"))
    return frozenset(found)


def listening_sockets(net: Path, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port.

    Args:
        net: the kernel's tables of one network namespace.
        port: the port.
    """
    return (inode for _address, inode in _listeners(net, port))


def sockets_at(address: IPv4Address | IPv6Address, port: int, net: Path) -> frozenset[str]:
    """Return the inodes of the sockets that take connections to an address.

    Whoever listens on the very address gets them; else whoever listens on all.
    """
    listeners = list(_listeners(net, port))
    exact = frozenset(inode for own, inode in listeners if own == address)
    # A socket on [::] takes IPv4 too, unless it was told not to, which procfs does not say.
    same = frozenset(i for own, i in listeners if own == ANY_ADDRESS[address.version])
    every = frozenset(i for own, i in listeners if own == ANY_ADDRESS[6])
    return exact or same or every


def _listeners(net: Path, port: int) -> Iterator[tuple[IPv4Address | IPv6Address, str]]:
    suffix = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            with (net / name).open(encoding="ascii") as table:
                text = table.read(_MAX_TABLE_BYTES)
        except OSError as error:
            if is_exhausted(error):
                raise
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and fields[1].endswith(suffix):
                yield _address(fields[1].removesuffix(suffix)), fields[9]


def _address(text: str) -> IPv4Address | IPv6Address:
    """Read an address of the kernel's tables: words of 32 bits in the host's own order."""
    raw = bytes.fromhex(text)
    words = [raw[start : start + 4] for start in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
