"""``nccltune profile``: list, show, compare and check profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from nccltune.cli.envelope import Answer
from nccltune.cli.host_words import host_facts
from nccltune.cli.lazy import LazyGroup, Verb
from nccltune.cli.options import json_option
from nccltune.cli.tables import fact_grid, heading, indent, number_table, settings_block
from nccltune.cli.words import format_moment, format_settings
from nccltune.envvars import canonical, needs_offer
from nccltune.store import (
    Found,
    Listed,
    Standing,
    Where,
    find_profile,
    list_profiles,
    load_profile,
    read_active,
    standing_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from nccltune.measurement import Settings
    from nccltune.profile import Profile
    from nccltune.store import ActiveState

_STATE_VERBS = "nccltune.cli.profile_state"


@click.group(
    name="profile",
    cls=LazyGroup,
    verbs={
        "list": Verb(__name__, "List profiles, shipped ones and those found here.", "list_command"),
        "show": Verb(
            __name__, "Show the settings of one and where they come from.", "show_command"
        ),
        "diff": Verb(__name__, "Show what two set differently.", "diff_command"),
        "check": Verb(__name__, "Check that a file can be used.", "check_command"),
        "activate": Verb(_STATE_VERBS, "Let launches have one from now on.", "activate_command"),
        "off": Verb(_STATE_VERBS, "Let launches start on SGLang's defaults.", "off_command"),
        "rollback": Verb(_STATE_VERBS, "Return to what was active before.", "rollback_command"),
        "import": Verb(_STATE_VERBS, "Check a file and keep it here.", "import_command"),
        "export": Verb(
            _STATE_VERBS, "Write one for containers, systemd, a shell or NCCL.", "export_command"
        ),
    },
)
def command() -> None:
    """Profiles: look at them, choose which one launches get, carry them in and out."""


@click.command(name="list")
@json_option
def list_command() -> Answer:
    """List the profiles that are shipped or were found here."""
    problems: list[str] = []
    active = read_active()
    listed = _told_once(_with_active(list_profiles(problems), active))
    problems += [each.problem for each in listed if each.problem]
    if active.problem is not None and active.problem not in problems:
        problems.append(active.problem)
    if active.warning:
        problems.append(active.warning)
    return Answer(
        data={
            "profiles": [_list_row(each, active) for each in listed],
            "active": active.name,
            "previous": active.previous,
        },
        show=lambda: _list_parts(listed, active),
        warnings=tuple(problems),
    )


def _with_active(listed: Sequence[Listed], active: ActiveState) -> Sequence[Listed]:
    """Add the host's active profile where it can be read, and the folder that it lies in cannot."""
    if active.profile is None or any(each.path == active.path for each in listed):
        return listed
    unlisted = Listed(active.profile.name, active.path, Where.HOST, active.profile)
    return sorted((unlisted, *listed), key=lambda each: each.name)


def _told_once(listed: Sequence[Listed]) -> list[Listed]:
    """Leave out a shipped profile while the copy that activating it has made is the same."""
    kept = {each.name: each.profile for each in listed if each.where is Where.STATE}
    return [
        each
        for each in listed
        if each.where is not Where.SHIPPED
        or each.profile is None
        or each.profile != kept.get(each.name)
    ]


def _standing(profile: Profile, where: Where, path: Path, active: ActiveState) -> str:
    # One of this user's may have the name of the host's that is active.
    is_named_alike = profile.name == active.name and path != active.path
    return str(
        standing_of(profile, where, replace(active, name=None) if is_named_alike else active)
    )


def _state(listed: Listed, active: ActiveState) -> str:
    if listed.profile is None:
        if listed.path == active.path:
            return str(Standing.ACTIVE)
        is_shipped = listed.where is Where.SHIPPED
        return str(Standing.SHIPPED if is_shipped else Standing.CANDIDATE)
    return _standing(listed.profile, listed.where, listed.path, active)


def _list_row(listed: Listed, active: ActiveState) -> Mapping[str, object]:
    profile = listed.profile
    return {
        "name": listed.name,
        "state": _state(listed, active),
        "path": str(listed.path),
        "settings": None if profile is None else dict(profile.settings),
        "source": None if profile is None else profile.source,
        "note": None if profile is None else profile.note,
        "problem": listed.problem,
    }


def _list_parts(listed: Sequence[Listed], active: ActiveState) -> Iterator[RenderableType]:
    if not listed:
        yield "No profiles. Find one with: nccltune search"
        return
    rows = (
        [
            each.name,
            _state(each, active),
            "-" if each.profile is None else each.profile.source or "-",
            "broken" if each.profile is None else format_settings(each.profile.settings),
        ]
        for each in listed
    )
    yield number_table(
        ("name", "state", "source", "settings"), rows, words=("name", "state", "source", "settings")
    )


@click.command(name="show")
@click.argument("name", metavar="NAME|FILE")
@json_option
def show_command(name: str) -> Answer:
    """Show the settings of a profile and where they come from."""
    found = find_profile(name)
    state = _standing(found.profile, found.where, found.path, read_active())
    return Answer(data=_show_data(found, state), show=lambda: _show_parts(found, state))


def _show_data(found: Found, state: str) -> dict[str, object]:
    profile = found.profile
    return {
        "name": profile.name,
        "state": state,
        "path": str(found.path),
        "settings": dict(profile.settings),
        "note": profile.note,
        "source": profile.source,
        "created_at": None if profile.created_at is None else profile.created_at.isoformat(),
        "fingerprint": profile.fingerprint,
        "measured": profile.measured,
    }


def _show_parts(found: Found, state: str) -> Iterator[RenderableType]:
    profile = found.profile
    yield fact_grid(_facts(profile, state))
    yield heading("Settings")
    yield indent(settings_block(profile.settings))
    if profile.fingerprint is not None:
        yield heading("Holds for")
        yield indent(fact_grid(host_facts(profile.fingerprint)))
    yield heading("File")
    yield f"  {found.path}"


def _facts(profile: Profile, state: str) -> Iterator[tuple[str, str]]:
    yield "profile", profile.name
    yield "state", state
    if profile.source:
        yield "source", profile.source
    if profile.created_at is not None:
        yield "found", format_moment(profile.created_at)
    if profile.note:
        yield "note", profile.note


@click.command(name="diff")
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@json_option
def diff_command(one: str, other: str) -> Answer:
    """Show what two profiles set differently."""
    first, second = find_profile(one).profile, find_profile(other).profile
    names = sorted(first.settings.keys() | second.settings.keys())
    differing = [name for name in names if first.settings.get(name) != second.settings.get(name)]
    is_equivalent = canonical(first.settings) == canonical(second.settings)
    data = {
        "names": [first.name, second.name],
        "is_equal": not differing,
        "is_equivalent": is_equivalent,
        "settings": {
            name: [first.settings.get(name), second.settings.get(name)] for name in differing
        },
    }
    return Answer(
        data=data, show=lambda: _diff_parts(first, second, differing, is_equivalent=is_equivalent)
    )


def _diff_parts(
    first: Profile, second: Profile, differing: Sequence[str], *, is_equivalent: bool
) -> Iterator[RenderableType]:
    if not differing:
        yield "Both set the same."
        return
    other = f"{second.name} (second)" if first.name == second.name else second.name
    columns = ("variable", first.name, other)
    rows = (
        [name, first.settings.get(name, "-"), second.settings.get(name, "-")] for name in differing
    )
    yield number_table(columns, rows, words=columns)
    if is_equivalent:
        yield "Only spelled differently: NCCL does the same under both."


@click.command(name="check")
@click.argument("file", metavar="FILE")
@json_option
def check_command(file: str) -> Answer:
    """Check that a profile file can be used, without using it."""
    path = Path(file)
    profile = load_profile(path)
    data = _show_data(Found(profile, path, Where.FILE), str(Standing.FILE))
    return Answer(
        data=data,
        show=lambda: [Text(f"{path}: good, {_count(profile.settings)}.")],
        warnings=tuple(_check_warnings(profile)),
    )


def _count(settings: Settings) -> str:
    count = len(settings)
    return f"{count} setting{'' if count == 1 else 's'}"


def _check_warnings(profile: Profile) -> Iterator[str]:
    for name in needs_offer(profile.settings):
        yield (
            f"{name}={profile.settings[name]} forces LL128 on, which is safe only where NCCL "
            "offers it by itself"
        )
