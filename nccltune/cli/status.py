"""``nccltune status``: running servers against the active profile, key by key, rank by rank.

Drawn with plain text, so that a script that asks often does not wait for what draws tables.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nccltune.cli.envelope import Answer, Complaint
from nccltune.cli.options import json_option
from nccltune.errors import ExitCode, NccltuneError, UsageProblem
from nccltune.host.fingerprint import MatchKind
from nccltune.live.drift import KeyState, Verdict
from nccltune.live.published import Published, read_published
from nccltune.live.scanner import find_servers
from nccltune.live.stock import Stock, take_stock
from nccltune.paths import reading_dir
from nccltune.store.access import access_advice, user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nccltune.live.drift import KeyReport
    from nccltune.live.profile_standing import LiveProfile
    from nccltune.live.servers import RankReport, ServerReport

_LABEL_WIDTH = 16
_UNKNOWN_VERDICTS = frozenset({Verdict.UNREADABLE, Verdict.BYPASSED, Verdict.STARTING})
_VERDICT_WORDS: Mapping[Verdict, str] = {
    Verdict.IN_EFFECT: "in effect in every rank",
    Verdict.PARTLY: "in effect but for what the operator or SGLang has set otherwise",
    Verdict.NOT_IN_EFFECT: "NOT IN EFFECT",
    Verdict.UNREADABLE: "unknown: the ranks cannot be read",
    Verdict.BYPASSED: "nothing is claimed: NCCL does not carry the verify pass",
    Verdict.STARTING: "unknown: there are no ranks yet, or no longer",
    Verdict.NOTHING_EXPECTED: "none is expected",
}
_STATE_WORDS: Mapping[KeyState, str] = {
    KeyState.IN_EFFECT: "in effect",
    KeyState.LOST: "LOST",
    KeyState.OVERRIDDEN_BY_SGLANG: "overridden by SGLang",
    KeyState.SET_BY_OPERATOR: "set by the operator",
    KeyState.UNREADABLE: "unreadable",
}
_ROUTE_WORDS: Mapping[str, str] = {
    "run": "through nccltune run",
    "launch": "through nccltune launch",
    "hook": "with the hook in SGLang",
    "verify": "through nccltune verify",
    "": "with no launch of nccltune on record",
}
_HOW_WORDS: Mapping[str, str] = {
    "manual": "by hand",
    "daemon": "by nccltuned",
    "search": "by nccltune search",
}


@click.command(name="status")
@click.option("--pid", type=int, metavar="PID", help="Only the server with this process id.")
@json_option
def command(pid: int | None) -> Answer:
    """Compare every running SGLang server with the active profile, by its ranks' own environment.

    Exit status: 0 the profile is in effect wherever it is expected, 3 it is not, or cannot be used,
    4 that cannot be told.
    """
    servers = [server for server in find_servers() if pid in (None, server.pid)]
    if pid is not None and not servers:
        raise UsageProblem(
            f"--pid {pid}: no SGLang server has this process id; leave it out to see all",
            code="no_such_server",
        )
    stock = take_stock(servers)
    if stock.profile.problem and (advice := access_advice(Path(stock.profile.path))):
        stock = replace(stock, profile=replace(stock.profile, advice=advice))
    published = read_published()
    errors = tuple(_complaints(stock))
    return Answer(
        data={**stock.to_json(), "nccltuned": _daemon_data(published)},
        show=lambda: map(_clean, _lines(stock, published)),
        exit_code=exit_code_of(stock),
        warnings=(*stock.warnings, *_warnings(stock)),
        errors=errors,
    )


def exit_code_of(stock: Stock) -> ExitCode:
    """Sum everything up: a no anywhere, else an unknown anywhere, else all is well."""
    verdicts = {server.verdict for server in stock.servers}
    if stock.profile.is_degraded or Verdict.NOT_IN_EFFECT in verdicts:
        return ExitCode.NO
    return ExitCode.UNKNOWN if verdicts & _UNKNOWN_VERDICTS else ExitCode.DONE


def _complaints(stock: Stock) -> Iterator[Complaint]:
    """Name what keeps the answer from being yes."""
    profile = stock.profile
    if profile.is_degraded:
        is_command = profile.advice.startswith("nccltune ")
        how = f"run: {profile.advice}" if is_command else profile.advice
        yield Complaint("profile_not_used", f"{_degraded_words(profile)}; {how}")
    for server in stock.servers:
        if server.verdict is Verdict.NOT_IN_EFFECT:
            yield from _lost(server)
        elif server.verdict is Verdict.UNREADABLE:
            why = next((rank.problem for rank in server.ranks if rank.problem), "")
            why = why or "set by a configuration file, which no environment shows"
            which = _rank_words(server.ranks)
            yield Complaint("unreadable", f"server {server.pid}, {which}: {why}; {server.fix}")
        elif server.verdict in _UNKNOWN_VERDICTS:
            code = "nccl_bypassed" if server.verdict is Verdict.BYPASSED else "starting"
            fix = f"; to let NCCL carry it: {server.fix}" if server.fix else ""
            yield Complaint(code, f"server {server.pid}: {server.reason}{fix}")


def _lost(server: ServerReport) -> Iterator[Complaint]:
    """Name every variable that is lost, once for all ranks where it is the same."""
    for key, ranks in _alike(server.ranks).items():
        if key.state is KeyState.LOST:
            yield Complaint(
                "lost",
                f"server {server.pid}, {_rank_words(ranks)}: {key.key} is {_actual(key)}, "
                f"expected {key.expected}: {key.note}",
            )


def _alike(ranks: Iterable[RankReport]) -> dict[KeyReport, list[RankReport]]:
    """Return the ranks in which a variable is the same, variable by variable."""
    alike: dict[KeyReport, list[RankReport]] = {}
    for rank in ranks:
        for key in rank.keys:
            alike.setdefault(key, []).append(rank)
    names = list(dict.fromkeys(key.key for key in alike))
    return dict(sorted(alike.items(), key=lambda found: names.index(found[0].key)))


def _rank_words(ranks: Sequence[RankReport]) -> str:
    """Write ``rank TP1 (pid 102)``, or ``ranks`` and every one of several."""
    return f"rank{'s' if len(ranks) > 1 else ''} {_named(ranks)}"


def _named(ranks: Iterable[RankReport]) -> str:
    return ", ".join(f"{rank.name} (pid {rank.pid})" for rank in ranks)


def _warnings(stock: Stock) -> Iterator[str]:
    if stock.profile.stale and not stock.profile.is_degraded:
        changed = ", ".join(stock.profile.stale)
        yield (
            f"profile {stock.profile.name} is stale, it is used unverified: changed since it was "
            f"found: {changed}; run: {stock.profile.advice}"
        )
    for server in stock.servers:
        for warning in server.warnings:
            yield f"server {server.pid}: {warning}"


def _degraded_words(profile: LiveProfile) -> str:
    name = f"profile {profile.name}" if profile.name else "the active profile"
    if profile.problem:
        return f"{name} cannot be used, and servers start without it: {profile.problem}"
    if profile.match is MatchKind.FOREIGN:
        differing = ", ".join(profile.differing)
        return f"{name} is not used here, it was found on another kind of host: {differing}"
    return f"{name} is not used, it is not known to fit this host: {profile.unknown}"


def _daemon_data(published: Published | None) -> Mapping[str, object]:
    if published is None:
        return {"is_running": False}
    data = published.data
    return {
        "is_running": True,
        "pid": published.pid,
        "version": data["nccltuned"].get("version"),
        "state_folder": data["nccltuned"].get("state_folder"),
        "published_at": data.get("published_at"),
        "failed_starts": data.get("failed_starts"),
        "rollbacks": data.get("rollbacks"),
    }


def _lines(stock: Stock, published: Published | None) -> Iterator[str]:
    yield from _profile_lines(stock.profile)
    yield from _daemon_lines(published)
    for server in stock.servers:
        yield ""
        yield from _server_lines(server)
    if not stock.servers:
        yield _fact("servers", "none is running, as far as this user can see")


def _clean(line: str) -> str:
    """Take out what could repaint a terminal: command lines and values are other users'."""
    return "".join(char if char.isprintable() else "?" for char in line)


def _fact(name: str, value: str) -> str:
    return f"{name:<{_LABEL_WIDTH}}{value}"


def _profile_lines(profile: LiveProfile) -> Iterator[str]:
    if profile.name is None and not profile.problem:
        left = f", {profile.previous} was before" if profile.previous else ""
        yield _fact("active profile", f"none{left}{_step_words(profile)}")
        return
    yield _fact("active profile", f"{profile.name or 'unknown'}{_step_words(profile)}")
    if profile.is_degraded:
        yield _fact("", f"NOT USED: {_degraded_words(profile)}")
    elif profile.match is None:
        yield _fact("this host", f"not compared: {profile.unknown}")
    else:
        differing = f", differing in {', '.join(profile.differing)}" if profile.differing else ""
        unknown = f"; {profile.unknown}" if profile.unknown else ""
        is_forced = profile.is_insisted_on and profile.match is MatchKind.FOREIGN
        why = "; used, for it was activated here with --any-host" if is_forced else ""
        yield _fact("this host", f"{profile.match}{differing}{unknown}{why}")
    if profile.stale:
        yield _fact("stale", f"changed since it was found: {', '.join(profile.stale)}")
    if profile.advice:
        yield _fact("to do", profile.advice)


def _step_words(profile: LiveProfile) -> str:
    if not profile.activated_at:
        return ""
    what = {"off": "switched off", "rollback": "ROLLED BACK to it"}.get(profile.action, "activated")
    if profile.action == "rollback" and profile.name is None:
        what = "ROLLED BACK"
    return f" ({what} {_moment(profile.activated_at)} {_HOW_WORDS.get(profile.how, '')})"


def _daemon_lines(published: Published | None) -> Iterator[str]:
    if published is None:
        yield _fact("nccltuned", "not running; launches do not need it")
        return
    folder = published.data["nccltuned"].get("state_folder")
    other = "" if folder == _own_folder() else f", for the profiles in {folder}"
    yield _fact("nccltuned", f"running, pid {published.pid}{other}")
    failed = published.data.get("failed_starts") or {}
    if failed.get("count"):
        limit = failed.get("rollback_after") or "never"
        yield _fact(
            "failed starts", f"{failed['count']} of {limit}, the last one: {failed.get('last')}"
        )
    for each in (published.data.get("rollbacks") or [])[-1:]:
        to = each.get("returned_to") or "no profile"
        yield _fact(
            "last roll-back",
            f"{each.get('profile_name')} to {to}, {_moment(str(each.get('at')))}, after "
            f"{each.get('failure_count')} failed starts ({each.get('ending')}); see the journal",
        )


def _own_folder() -> str:
    try:
        return str(reading_dir())
    except NccltuneError:
        return ""


def _server_lines(server: ServerReport) -> Iterator[str]:
    shown = shlex.join(server.command) if server.command else "(its launching process is gone)"
    yield _fact(f"server {server.pid}", shown)
    under = f", under profile {server.started_under}" if server.started_under else ""
    yield _fact(
        "  started",
        f"{_moment(server.started_at)} by {user_name(server.uid)} "
        f"{_ROUTE_WORDS[server.route]}{under}",
    )
    yield _fact("  profile", f"{_VERDICT_WORDS[server.verdict]}: {server.reason}")
    if server.path is not None:
        yield _fact("  all-reduce", f"{server.path.path}: {server.path.reason}")
    if server.fix:
        yield _fact("  to do", server.fix)
    yield from _key_lines(server.ranks)


def _key_lines(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Show each variable: a line for all ranks that are alike, with every rank's name and pid."""
    for key, members in _alike(ranks).items():
        facts = f"{key.key}: {_STATE_WORDS[key.state]} in {_named(members)}: "
        facts += f"expected {key.expected}, actual {_actual(key)}"
        remarks = [f"from {key.source}" if key.source else "", key.note]
        yield f"  {'; '.join([facts, *filter(None, remarks)])}"


def _actual(key: KeyReport) -> str:
    if key.actual is None:
        return "unknown" if key.state is KeyState.UNREADABLE else "not set"
    return key.actual


def _moment(text: str) -> str:
    """Shorten ISO 8601 in UTC to the second."""
    return f"{text[:19].replace('T', ' ')} UTC"
