"""What became of the active profile in every running SGLang server, rank by rank.

Changes nothing, and judges the ranks' own environment, whatever the environment of the caller is.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nccltune.envvars import CATALOGUE, canonical
from nccltune.inject.marker import settings_digest
from nccltune.inject.resolver import Decision, resolve
from nccltune.live.drift import (
    Expectation,
    KeyReport,
    KeyState,
    SglangWrite,
    Verdict,
    compare_rank,
    judge,
)
from nccltune.live.procfs import PROC_ROOT, Unreadable, is_running, read_uid
from nccltune.live.server_facts import (
    ServerFacts,
    conf_entries,
    read_facts,
    read_started_at,
    redacted,
)
from nccltune.paths import HOME_VARIABLE
from nccltune.sglang.defaults import EnvironmentWrite, writes_for
from nccltune.store import Launches, Policy

if TYPE_CHECKING:
    from nccltune.host.facts import HostFacts
    from nccltune.live.scanner import Rank, Server
    from nccltune.payloads.shapes import ModelShape
    from nccltune.seen_files import SeenFiles
    from nccltune.sglang.allreduce_path import PathVerdict
    from nccltune.sglang.command import LaunchCommand
    from nccltune.store import ActiveState, LaunchRecord

HostReader = Callable[[str | None, Mapping[str, str], "SeenFiles"], "tuple[HostFacts | None, str]"]
"""From a server's interpreter, environment and files to the host as it sees it, or why that is
unknown."""

MAX_USER_S = 5.0
"""For all servers of one user; one takes some 20 ms."""

MAX_LOOK_S = 40.0

_ROUTE_WORDS = {
    "run": "nccltune run",
    "launch": "nccltune launch",
    "hook": "the hook in SGLang",
    "verify": "nccltune verify",
}

ShapeReader = Callable[["LaunchCommand", Mapping[str, str], "SeenFiles"], "ModelShape | None"]
"""From a launch command, its environment and its files to the model; None where not known."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank: its variables, and why they cannot be read where they cannot."""

    pid: int
    name: str
    keys: tuple[KeyReport, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server against the active profile.

    Attributes:
        uid: whose it is; None where it has just ended.
        command: without values that look like secrets; empty where its process is gone.
        started_at: ISO 8601, UTC.
        route: ``run``, ``launch`` or ``hook``; empty where none of ours is on record.
        started_under: name or digest of the profile that it was started under; empty for none.
        expected: name of the profile that it should have; None where it should have none.
        reason: why it should have it or not, and what is wrong, in one line.
        path: what carries the verify all-reduces; None where that was not looked into.
        fix: what to do; empty where there is nothing to do.
    """

    pid: int
    uid: int | None
    command: tuple[str, ...]
    started_at: str
    verdict: Verdict
    ranks: tuple[RankReport, ...]
    route: str = ""
    started_under: str = ""
    expected: str | None = None
    reason: str = ""
    path: PathVerdict | None = None
    warnings: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What all servers of a host are judged by.

    Attributes:
        records: launches, the newest last.
        read_host: asked once a server that may get the profile.
        read_shape: asked for the model of each server.
        proc_root: where procfs is mounted.
        is_for_all: every server is compared with the profile, whatever the rules about hosts and
            launches say.
        home: the folder that ``active`` was read in; None where it is of no store.
    """

    active: ActiveState
    policy: Policy
    records: Sequence[LaunchRecord]
    read_host: HostReader
    read_shape: ShapeReader
    proc_root: Path = PROC_ROOT
    is_for_all: bool = False
    home: Path | None = None

    @property
    def digest(self) -> str | None:
        """Of the active profile."""
        profile = self.active.profile
        return None if profile is None else settings_digest(profile.settings)


def report_servers(
    servers: Iterable[Server], context: Context, clock: Callable[[], float] = time.monotonic
) -> tuple[ServerReport, ...]:
    """Judge every server that is still there; one user's cannot take the time of all others."""
    begun_s = clock()
    spent_s: defaultdict[int | None, float] = defaultdict(float)
    found: dict[int, ServerReport] = {}
    uids = {server: read_uid(server.pid, context.proc_root) for server in servers}
    trusted = (0, os.geteuid())
    for server, uid in sorted(uids.items(), key=lambda item: item[1] not in trusted):
        now_s = clock()
        if spent_s[uid] > MAX_USER_S or now_s - begun_s > MAX_LOOK_S:
            found[server.pid] = _unseen(server, uid, context)
            continue
        report = report_server(server, context)
        spent_s[uid] += clock() - now_s
        if report.ranks or _has_root(server, context):
            found[server.pid] = report
    return tuple(found[server.pid] for server in uids if server.pid in found)


def _unseen(server: Server, uid: int | None, context: Context) -> ServerReport:
    process = server.root or server.ranks[0].process
    return ServerReport(
        pid=server.pid,
        uid=uid,
        command=redacted(process.argv),
        started_at=read_started_at(process),
        verdict=Verdict.UNREADABLE,
        ranks=(),
        reason=f"not looked at, for the servers of user {uid} take too long to look at",
    )


def _has_root(server: Server, context: Context) -> bool:
    return server.root is not None and is_running(server.root, context.proc_root)


def report_server(server: Server, context: Context) -> ServerReport:
    """Judge one server, by the ranks that it still has."""
    facts = read_facts(server, context.records, context.proc_root)
    left = [rank for rank in server.ranks if not _is_gone(facts, rank)]
    decision = _decide(facts, context)
    expectation = _expectation(facts, decision, context)
    ranks = tuple(_report_rank(facts, rank, expectation) for rank in left)
    is_bypassed = decision.path is not None and decision.path.is_nccl is False
    report = ServerReport(
        pid=server.pid,
        uid=read_uid(server.pid, context.proc_root),
        command=redacted(server.root.argv) if server.root is not None else (),
        started_at=read_started_at(server.root or server.ranks[0].process),
        verdict=judge([rank.keys for rank in ranks], is_bypassed=is_bypassed),
        ranks=ranks,
        route=facts.record.route if facts.record else "",
        started_under=_started_under(facts, context),
        expected=decision.profile_name,
        reason=decision.reason,
        path=decision.path,
        warnings=decision.warnings,
    )
    return _explained(report, facts, context)


def _decide(facts: ServerFacts, context: Context) -> Decision:
    """Ask the resolver what this launch should have; what was decided at its start stays so."""
    if not facts.argv:
        return Decision(facts.problem)
    is_marked = facts.marker is not None and facts.marker.digest == context.digest
    is_decided = is_marked or context.is_for_all
    host, host_problem = context.read_host(facts.python, facts.environ, facts.files)
    shape = None
    if facts.command is not None:
        shape = context.read_shape(facts.command, facts.environ, facts.files)
    return resolve(
        argv=facts.argv,
        environ=facts.launch_environ or {},
        active=context.active,
        here=None if host is None else host.fingerprint,
        policy=Policy(Launches.ALL) if is_decided else context.policy,
        sglang_version=facts.version,
        is_any_host=is_decided,
        host_problem=host_problem,
        gpu_architecture=None if host is None else host.gpu_architecture,
        shape=shape,
    )


def _expectation(facts: ServerFacts, decision: Decision, context: Context) -> Expectation | None:
    """Turn a decision into what the ranks should have; None where they should have nothing."""
    profile = context.active.profile
    if decision.profile_name is None or decision.digest is None or profile is None:
        return None
    kept = ", ".join(f"{name}={value}" for name, value in decision.kept_from_operator.items())
    writes: list[EnvironmentWrite] = []
    if facts.command is not None:
        writes = writes_for(facts.command, facts.version, facts.launch_environ)
    return Expectation(
        settings=profile.settings,
        profile_name=profile.name,
        digest=decision.digest,
        route=_ROUTE_WORDS.get(facts.record.route, "") if facts.record else "",
        launch_environ=facts.launch_environ,
        withheld={
            key: f"left to the operator, who has set {kept or 'what it does not fit'}"
            for key in profile.settings
            if key not in decision.applied
        },
        forced={
            key: SglangWrite(write.variable, write.value, write.reason)
            for write in writes
            for key, value in profile.settings.items()
            if write.is_forced and _is_same_number(key, value, write)
        },
        defaults={write.variable: write.value for write in writes if not write.is_forced},
    )


def _is_same_number(key: str, value: str, write: EnvironmentWrite) -> bool:
    """Whether a setting and a write feed one number of NCCL, under an older and a newer name."""
    if key == write.variable:
        return True
    if write.variable not in CATALOGUE:
        return False
    ours, theirs = canonical({key: value}), canonical({write.variable: write.value})
    return bool(ours.keys() & theirs.keys())


def _is_gone(facts: ServerFacts, rank: Rank) -> bool:
    """Whether a rank has ended since the scan, which is no fault of what it had."""
    return facts.environs[rank.process.pid].problem == Unreadable.GONE


def _report_rank(facts: ServerFacts, rank: Rank, expectation: Expectation | None) -> RankReport:
    pid = rank.process.pid
    reading = facts.environs[pid]
    keys: tuple[KeyReport, ...] = ()
    if expectation is not None:
        conf = conf_entries(facts, pid)
        keys = compare_rank(
            replace(expectation, conf=conf), reading.values, facts.markers.get(pid), reading.problem
        )
    return RankReport(pid, rank.name, keys, reading.problem)


def _started_under(facts: ServerFacts, context: Context) -> str:
    """Name the profile that a server was started under."""
    marker, record, profile = facts.marker, facts.record, context.active.profile
    if record is not None and record.digest is not None:
        return record.profile_name or record.digest
    if marker is None:
        return ""
    if marker.digest == context.digest and profile is not None:
        return profile.name
    return marker.digest


def _explained(report: ServerReport, facts: ServerFacts, context: Context) -> ServerReport:
    """Put what is wrong, and what to do, beside the facts."""
    causes = [cause for cause in _causes(report, facts, context) if cause]
    fixes = {
        Verdict.NOT_IN_EFFECT: "restart it with: nccltune run -- CMD",
        Verdict.UNREADABLE: "set SPT_NOENV=1 at its start, as nccltune run does, or ask as root",
        Verdict.BYPASSED: report.path.fix if report.path else "",
    }
    expected = f"profile {report.expected} is expected" if report.expected else report.reason
    reason = "; ".join([expected, *causes])
    return replace(report, reason=reason, fix=fixes.get(report.verdict, ""))


def _causes(report: ServerReport, facts: ServerFacts, context: Context) -> Iterator[str]:
    marker = facts.marker
    home = (facts.launch_environ or {}).get(HOME_VARIABLE)
    if home and context.home is not None and Path(home) != context.home:
        asked = f"this answer is about {context.home}"
        yield f"it was started with {HOME_VARIABLE}={home}, and {asked}: ask with the same"
    if marker is not None and marker.digest != context.digest:
        another = "" if context.digest is None else "another profile, "
        yield f"it was started under {another}{report.started_under}"
    if facts.server.ranks and not report.ranks:
        yield "it is ending, for its ranks have ended"
    if report.verdict is Verdict.BYPASSED and report.path is not None:
        yield f"NCCL does not carry its verify pass, and nothing is claimed: {report.path.reason}"
    if report.verdict is not Verdict.NOT_IN_EFFECT:
        return
    if context.active.activated_at and report.started_at < context.active.activated_at:
        yield "it was started before the profile was activated"
    elif marker is None and not facts.record:
        yield "no route of nccltune took part in its start"
    lost = {key.key for rank in report.ranks for key in rank.keys if key.state is KeyState.LOST}
    if marker is not None and marker.digest == context.digest and lost:
        yield f"set at its start and gone in its ranks: {', '.join(sorted(lost))}"
