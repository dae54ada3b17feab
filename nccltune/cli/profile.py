"""``nccltune profile``: list, show, compare and check profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from nccltune.cli.envelope import Answer
from nccltune.cli.lazy import LazyGroup, Verb
from nccltune.cli.options import json_option
from nccltune.cli.tables import fact_grid, heading, indent, number_table, settings_block
from nccltune.cli.words import format_moment, format_settings
from nccltune.envvars import canonical, needs_offer
from nccltune.store import Found, Where, find_profile, list_profiles, load_profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from nccltune.measurement import Settings
    from nccltune.profile import Profile
    from nccltune.store import Listed

STATE_WORDS = {Where.STATE: "candidate", Where.SHIPPED: "shipped", Where.FILE: "file"}


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
    },
)
def command() -> None:
    """List, show, compare and check profiles."""


@click.command(name="list")
@json_option
def list_command() -> Answer:
    """List the profiles that are shipped or were found here."""
    listed = list_profiles()
    return Answer(
        data={"profiles": [_list_row(each) for each in listed]},
        show=lambda: _list_parts(listed),
        warnings=tuple(each.problem for each in listed if each.problem),
    )


def _list_row(listed: Listed) -> Mapping[str, object]:
    profile = listed.profile
    return {
        "name": listed.name,
        "state": STATE_WORDS[listed.where],
        "path": str(listed.path),
        "settings": None if profile is None else dict(profile.settings),
        "source": None if profile is None else profile.source,
        "note": None if profile is None else profile.note,
        "problem": listed.problem,
    }


def _list_parts(listed: Sequence[Listed]) -> Iterator[RenderableType]:
    if not listed:
        yield "No profiles. Find one with: nccltune search"
        return
    rows = (
        [
            each.name,
            STATE_WORDS[each.where],
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
    return Answer(data=_show_data(found), show=lambda: _show_parts(found))


def _show_data(found: Found) -> dict[str, object]:
    profile = found.profile
    return {
        "name": profile.name,
        "state": STATE_WORDS[found.where],
        "path": str(found.path),
        "settings": dict(profile.settings),
        "note": profile.note,
        "source": profile.source,
        "created_at": None if profile.created_at is None else profile.created_at.isoformat(),
        "fingerprint": profile.fingerprint,
        "measured": profile.measured,
    }


def _show_parts(found: Found) -> Iterator[RenderableType]:
    profile = found.profile
    yield fact_grid(_facts(profile, STATE_WORDS[found.where]))
    yield heading("Settings")
    yield indent(settings_block(profile.settings))
    if profile.fingerprint is not None:
        yield heading("Holds for")
        yield indent(fact_grid(_host_facts(profile.fingerprint)))
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


def _host_facts(fingerprint: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in fingerprint.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield name.replace("_", " "), "unknown" if value is None else text


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
    data = _show_data(Found(profile, path, Where.FILE))
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
