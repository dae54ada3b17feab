"""``nccltune profile``: choose which profile launches get, and carry profiles in and out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from nccltune.atomic import write_output
from nccltune.cli.envelope import Answer, Complaint
from nccltune.cli.host_check import Fit, find_fit
from nccltune.cli.options import json_option, launch_argument
from nccltune.cli.tables import fact_grid, heading, indent, number_table
from nccltune.cli.words import NO_SETTINGS, format_settings
from nccltune.errors import ExitCode, FileError, UsageProblem
from nccltune.export import EXPORTS, export_profile, export_warnings
from nccltune.host.server_python import find_python, installed_version, package_dirs
from nccltune.inject.profile_effects import effects_on
from nccltune.profile import check_name, parse_profile, source_doubt
from nccltune.store import (
    Where,
    activate,
    deactivate,
    find_profile,
    load_profile,
    profiles_dir,
    read_active,
    rollback,
    save_candidate,
)
from nccltune.store.reading import MAX_BYTES, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from nccltune.inject.profile_effects import Effect
    from nccltune.profile import Profile
    from nccltune.store import Activation

STDIN = "-"
_NEXT_LAUNCH = "Servers that run now keep what they were started with; the next launch gets this."


@click.command(name="activate")
@click.argument("name", metavar="NAME")
@click.option(
    "--any-host", is_flag=True, help="Activate it although it was not made for this host."
)
@click.option(
    "--python",
    metavar="PATH",
    help="The server's interpreter, whose NCCL counts. Default: that of CMD, else this one.",
)
@launch_argument
@json_option
def activate_command(
    name: str, any_host: bool, python: str | None, launch: tuple[str, ...]
) -> Answer:
    """Let every launch from now on have this profile.

    This host is compared with the one that the profile was made on, as every launch does again. A
    server's launch command can stand after -- to see what SGLang does to each variable under its
    flags.
    """
    found = find_profile(name, is_own=True)
    if found.where is Where.FILE:
        raise UsageProblem(
            f"{name} is a file, and launches get what the store holds; first: nccltune profile "
            f"import {name}",
            code="not_in_store",
        )
    if python is not None and not Path(python).exists():
        raise UsageProblem(f"--python {python}: no such file", code="no_such_python")
    profile = found.profile
    effects = effects_on(profile.settings, launch, _sglang_version(python, launch))
    fit = find_fit(profile, python=python, launch=launch, is_any_host=any_host)
    if fit.refusal is not None:
        return _refused(profile, fit, effects)
    step = activate(name, reason="manual", is_any_host=any_host, gpu_uuids=fit.gpu_uuids)
    return Answer(
        data=_step_data(step) | _checked_data(profile, fit, effects),
        show=lambda: _activated_parts(step, profile, fit, effects),
        warnings=(*fit.warnings, *_problem(step)),
    )


def _sglang_version(python: str | None, launch: Sequence[str]) -> str | None:
    """Return the SGLang that will run; None where it cannot be told, which counts as the newest."""
    found = python or find_python(launch, os.environ)
    return None if found is None else installed_version(package_dirs(found, os.environ), "sglang")


def _refused(profile: Profile, fit: Fit, effects: Sequence[Effect]) -> Answer:
    assert fit.refusal is not None  # noqa: S101 - the caller has seen it
    active = read_active()
    message = f"profile {profile.name} was not activated: {fit.refusal.message}"
    return Answer(
        data={"active": active.name, **_checked_data(profile, fit, effects)},
        show=lambda: [f"Active as before: {active.name or 'no profile'}."],
        exit_code=ExitCode.NO,
        errors=(Complaint(fit.refusal.code, message),),
    )


@click.command(name="off")
@json_option
def off_command() -> Answer:
    """Let launches start on SGLang's own defaults again."""
    step = deactivate()
    return Answer(data=_step_data(step), show=lambda: _step_parts(step), warnings=_problem(step))


@click.command(name="rollback")
@json_option
def rollback_command() -> Answer:
    """Return to what was active before; once more returns from there."""
    step = rollback()
    return Answer(data=_step_data(step), show=lambda: _step_parts(step), warnings=_problem(step))


@click.command(name="import")
@click.argument("file", metavar="FILE")
@click.option("--name", metavar="NAME", help="Keep it under this name, not its own.")
@click.option("--replace", "is_replacing", is_flag=True, help="Take the place of one of that name.")
@json_option
def import_command(file: str, name: str | None, is_replacing: bool) -> Answer:
    """Check a profile file and keep a copy of it here, as a candidate; - is standard input."""
    profile = _read_stdin() if file == STDIN else load_profile(Path(file))
    if name is not None:
        profile = replace(profile, name=name)
    check_name(profile.name)
    kept = profiles_dir() / f"{profile.name}.json"
    old = _kept(kept)
    if old not in (None, profile) and not is_replacing:
        raise UsageProblem(
            f"there is another profile named {profile.name!r} ({kept}); add --replace to put this "
            "one in its place, or --name NAME to keep both",
            code="name_taken",
        )
    path = save_candidate(profile)
    doubt = source_doubt(profile.source)
    data = {
        "name": profile.name,
        "path": str(path),
        "settings": dict(profile.settings),
        "state": "candidate",
        "is_replaced": old is not None,
    }
    return Answer(
        data=data,
        show=lambda: _imported_parts(profile, path),
        warnings=(f"profile {profile.name} was {doubt.words}",) if doubt else (),
    )


@click.command(name="export")
@click.argument("name", metavar="[NAME|FILE]", required=False)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(EXPORTS)),
    required=True,
    help="Who reads it: docker (also podman), k8s, shell, systemd, nccl-conf, or plain env lines.",
)
@click.option("--output", metavar="FILE", help="Write it there, not to standard output.")
@json_option
def export_command(name: str | None, format_name: str, output: str | None) -> Answer:
    """Write a profile for a reader that knows nothing of this tool; the active one by default.

    What is written holds without condition: nothing looks at the command or at the host any more.
    """
    profile = _active_profile() if name is None else find_profile(name).profile
    export = EXPORTS[format_name]
    text = export_profile(profile, export)
    if output is not None:
        write_output(Path(output), text)
    data = {
        "name": profile.name,
        "format": format_name,
        "settings": dict(profile.settings),
        "text": text,
        "path": output,
    }
    shown = text.splitlines() if output is None else [f"Written to {output} for {export.reader}."]
    return Answer(data=data, show=lambda: shown, warnings=export_warnings(profile, export))


def _read_stdin() -> Profile:
    """Read a profile that is piped in; who types the command answers for what it says.

    Raises:
        FileError: as for ``load_profile``.
    """
    name = Path("standard input")
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise FileError(name, "is larger than 1 MiB, which no profile is", code="too_large")
    return parse_profile(decode(name, content), name)


def _active_profile() -> Profile:
    active = read_active()
    if active.profile is not None:
        return active.profile
    reason = active.problem or "no profile is active"
    raise UsageProblem(f"{reason}; name the profile to export", code="no_active_profile")


def _kept(path: Path) -> Profile | None:
    """Return what stands under a name already; a broken file is in nobody's way."""
    try:
        return load_profile(path)
    except FileError:
        return None


def _step_data(step: Activation) -> dict[str, object]:
    return {
        "active": step.name,
        "previous": step.previous,
        "replaced": step.replaced,
        "action": step.action,
        "activated_at": step.activated_at,
        "path": str(step.path),
        "state_folder": str(step.path.parents[1] if step.name else step.path.parent),
    }


def _checked_data(profile: Profile, fit: Fit, effects: Sequence[Effect]) -> dict[str, object]:
    return {
        "name": profile.name,
        "settings": dict(profile.settings),
        "match": fit.kind,
        "differing": list(fit.differing),
        "sglang": [
            {"variable": each.variable, "effect": each.kind, "message": each.message}
            for each in effects
        ],
    }


def _problem(step: Activation) -> tuple[str, ...]:
    return () if step.problem is None else (f"what was there before: {step.problem}",)


def _activated_parts(
    step: Activation, profile: Profile, fit: Fit, effects: Sequence[Effect]
) -> Iterator[RenderableType]:
    yield from _step_parts(step)
    yield fact_grid([("this host", fit.sentence), ("kept in", str(step.path.parents[1]))])
    if effects:
        yield heading("What SGLang does with it")
        rows = [
            [format_settings({e.variable: profile.settings[e.variable]}), e.message]
            for e in effects
        ]
        columns = ("variable", "SGLang")
        yield indent(number_table(columns, rows, words=columns))


def _step_parts(step: Activation) -> Iterator[RenderableType]:
    now = f"Active: {step.name}." if step.name else "No profile is active."
    yield f"{now} Before: {step.replaced or 'none'}. {_NEXT_LAUNCH}"


def _imported_parts(profile: Profile, path: Path) -> Iterator[RenderableType]:
    yield f"Kept as {path}"
    shown = format_settings(profile.settings) if profile.settings else NO_SETTINGS
    yield Text(shown)
    insists = " --any-host" if source_doubt(profile.source) else ""
    yield f"To use it: nccltune profile activate {profile.name}{insists}"
