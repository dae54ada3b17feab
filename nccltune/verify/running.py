"""Measures a server that runs already; starts and stops nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nccltune.bench.host_lock import VERIFY, host_lock, host_lock_path
from nccltune.errors import ServerError
from nccltune.live.listeners import sockets_at, sockets_of
from nccltune.live.procfs import PROC_ROOT
from nccltune.live.scanner import find_servers
from nccltune.live.server_facts import ServerFacts, read_facts
from nccltune.live.stock import host_of
from nccltune.sglang.endpoints import Endpoint, endpoint_at
from nccltune.store import read_active
from nccltune.verify.load.rounds import measure
from nccltune.verify.model import Arm, Boot
from nccltune.verify.record import Problem, VerifyRecord, save
from nccltune.verify.resuming import new_id, now, telling
from nccltune.verify.sameness import hidden
from nccltune.verify.serving.seen import check_is_sglang, look
from nccltune.verify.serving.vigil import Vigil, parts_of

if TYPE_CHECKING:
    from nccltune.host.fingerprint import Fingerprint
    from nccltune.live.scanner import Server
    from nccltune.profile import Profile
    from nccltune.verify.load.rounds import LoadPlan

RUNNING_ARM = "running"
_NOTICE_S = 2.0


def measure_running(
    url: str,
    plan: LoadPlan,
    *,
    profile: Profile | None = None,
    api_key: str = "",
    on_progress: Callable[[str], None] | None = None,
) -> VerifyRecord:
    """Measure the server at an address, and compare its ranks with a profile.

    A server that does not answer as asked gives a record without a boot, with the reason among its
    problems.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        plan: what it is asked.
        profile: what its ranks should have; the active one if None.
        api_key: the server's, where it wants one.
        on_progress: told what is being done.

    Raises:
        UsageProblem: that is no address.
        ServerError: nobody answers there, or no SGLang does.
        BusyError: a search or verify runs on this host.
        FileError: the state folder cannot be written.
    """
    endpoint = endpoint_at(url, api_key=api_key)
    check_is_sglang(endpoint)
    with host_lock(host_lock_path(), VERIFY):
        servers, problem = servers_at(endpoint, find_servers())
        expected = read_active().profile if profile is None else profile
        facts = read_facts(servers[0], ()) if servers else None
        notes = list(_notes(facts, servers, problem))
        boots: tuple[Boot, ...] = ()
        problems: tuple[Problem, ...] = ()
        try:
            boot, remarks = _boot(endpoint, servers, plan, expected, on_progress)
            boots, notes = (boot,), [*notes, *remarks]
        except ServerError as error:
            problems = (Problem(RUNNING_ARM, 0, error.code, str(error)),)
        record = VerifyRecord(
            id=new_id(),
            created_at=now(),
            launch=hidden(() if facts is None else facts.argv),
            arms=(_arm(facts, expected),),
            load=asdict(plan),
            boot_total=1,
            boots=boots,
            fingerprint=_fingerprint(facts),
            environ=telling({} if facts is None else facts.environ),
            url=endpoint.url,
            problems=problems,
            notes=tuple(notes),
            is_finished=not problems,
        )
        save(record)
        return record


class Found(NamedTuple):
    """The processes behind an address.

    Attributes:
        servers: one, or all its "nodes" on this host; none where they cannot be told.
        problem: why they cannot, in words; empty where they can.
    """

    servers: tuple[Server, ...]
    problem: str = ""


def servers_at(endpoint: Endpoint, servers: Sequence[Server], root: Path = PROC_ROOT) -> Found:
    """Return the processes behind an address.

    None where it is not on this host, where its processes may not be looked into, or where several
    servers share it.
    """
    unseen = Found(
        (),
        f"the server at {endpoint.url} is not among the processes that can be seen from here",
    )
    for address in _own_addresses(endpoint.host):
        listening = sockets_at(address, endpoint.port, root / "net")
        if not listening:
            continue  # the next one is tried, as a client does
        holders = [each for each in servers if not listening.isdisjoint(_sockets(each, root))]
        if len(holders) > 1:
            pids = ", ".join(str(each.pid) for each in holders)
            return Found((), f"several servers listen at {endpoint.url} (processes {pids})")
        if not holders:
            return unseen
        (server,) = holders
        others = [each for each in servers if each is not server and _is_peer(each, server)]
        return Found((server, *others))
    return unseen


def _sockets(server: Server, root: Path) -> frozenset[str]:
    pids = [] if server.root is None else [server.root.pid]
    pids += [rank.process.pid for rank in server.ranks]
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or one may not look into it
            found |= sockets_of(pid, root)
    return frozenset(found)


def _is_peer(one: Server, other: Server) -> bool:
    """Tell whether two servers are nodes of one: they meet at the same address."""
    meeting = _meeting(one)
    return meeting is not None and meeting == _meeting(other)


def _meeting(server: Server) -> str | None:
    command = read_facts(server, ()).command
    if command is None or command.nnodes < 2:
        return None
    return command.value("dist_init_addr")


def _own_addresses(host: str) -> Iterator[IPv4Address | IPv6Address]:
    """Yield what a name stands for, in the order in which it is tried, as far as it is this host's.

    Only then can it be listened on.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _name, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        yield ip_address(str(address[0]).partition("%")[0])


def _boot(
    endpoint: Endpoint,
    servers: Sequence[Server],
    plan: LoadPlan,
    profile: Profile | None,
    on_progress: Callable[[str], None] | None,
) -> tuple[Boot, tuple[str, ...]]:
    with Vigil(parts_of(servers)) as vigil:
        try:
            seen = look(servers, endpoint, profile)
            measured = measure(endpoint, plan, on_progress)
        except ServerError as error:
            if not vigil.wait(_NOTICE_S):
                raise
            message = f"{vigil.fallen} ended in the middle (the load saw: {error})"
            raise ServerError(message, code="server_died") from error
    boot = Boot(
        arm=RUNNING_ARM,
        position=0,
        started_at=now(),
        start_s=0.0,
        runs=measured.runs,
        ttft_short_ms=measured.ttft_short_ms,
        ttft_long_ms=measured.ttft_long_ms,
        seen=seen,
    )
    return boot, measured.remarks


def _arm(facts: ServerFacts | None, profile: Profile | None) -> Arm:
    if facts is None or facts.command is None:
        return Arm(RUNNING_ARM, (), profile)
    command = facts.command
    return Arm(
        name=RUNNING_ARM,
        argv=hidden(facts.argv),  # with what its --config file sets, as the server sees that
        profile=profile,
        num_steps=command.num_steps,
        is_speculative=command.is_speculative,
    )


def _fingerprint(facts: ServerFacts | None) -> Fingerprint | None:
    if facts is None:
        return None
    host, _problem = host_of(facts.python, facts.environ, facts.files)
    return None if host is None else host.fingerprint


def _notes(facts: ServerFacts | None, servers: Sequence[Server], problem: str) -> Iterator[str]:
    if facts is None:
        yield f"{problem}, so that nothing is known of its ranks, its launch and its host"
        return
    command = facts.command
    if command is not None and command.nnodes > len(servers):
        yield f"{len(servers)} of its {command.nnodes} nodes can be seen from here"
