"""The interpreter that runs a server, and what is installed there, told without running it.

It is often not the one that runs this tool. Starting it costs more than a launch should wait, and
importing torch there costs seconds; the folders that it looks into tell enough. Where they do not,
a launch starts it after all, for it does so anyway; a look at somebody else's server never does.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from nccltune.errors import UsageProblem
from nccltune.seen_files import OWN, SeenFiles, is_dir, is_file
from nccltune.sglang.argv import split_launch

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_MAX_SCRIPT_BYTES = 64 * 1024
_MAX_SETTINGS_BYTES = 64 * 1024
_ASK_TIMEOUT_S = 5.0
_ASK = "import sys; print('\\n'.join(sys.path))"


def find_python(
    argv: Sequence[str], environ: Mapping[str, str], files: SeenFiles = OWN
) -> str | None:
    """Return the interpreter that a launch runs SGLang in; None where that cannot be told.

    Args:
        argv: the launch command as typed, wrappers included.
        environ: of the launch, for its ``PATH``.
        files: as the launch sees them.
    """
    try:
        start, _tokens = split_launch(tuple(argv))
    except UsageProblem:
        return None
    for word in reversed(argv[:start]):
        if _PYTHON.fullmatch(PurePath(word).name):
            return find_program(word, environ, files)
    if PurePath(argv[start]).name != "sglang":
        return None
    script = find_program(argv[start], environ, files)
    return None if script is None else _interpreter_of(Path(script), environ, files)


def find_program(name: str, environ: Mapping[str, str], files: SeenFiles = OWN) -> str | None:
    """Return the file that a command's first word stands for; None where there is none."""
    if "/" in name:
        return name if is_file(files, Path(name)) else None
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(folder or ".", name)
        if files.may_execute(path):
            return str(path)
    return None


def package_dirs(
    python: str, environ: Mapping[str, str], files: SeenFiles = OWN
) -> tuple[Path, ...]:
    """Return the folders that an interpreter looks into for packages, in its order.

    Args:
        python: the interpreter, unresolved: a link in a virtual environment means that one.
        environ: of the launch, for ``PYTHONPATH`` and ``HOME``.
        files: as the launch sees them.
    """
    likely = _likely_dirs(Path(python), environ, files)
    found = [folder for folder in likely if is_dir(files, folder)]
    if files.may_run and not any(_has_server(folder, files) for folder in found):
        found = [folder for folder in _ask(python, environ) if is_dir(files, folder)] or found
    return tuple(dict.fromkeys(found))


def installed_version(folders: Sequence[Path], name: str, files: SeenFiles = OWN) -> str | None:
    """Return the version of a distribution, by the first folder that has it; None for none."""
    return next((version for _, version in installed(folders, re.escape(name), files)), None)


def installed(
    folders: Sequence[Path], pattern: str, files: SeenFiles = OWN
) -> Iterator[tuple[Path, str]]:
    """Yield the metadata folder and version of every distribution of a name.

    Args:
        folders: where to look.
        pattern: of the name, with underscores.
        files: as the server sees them.
    """
    fits = re.compile(rf"(?:{pattern})-([^-]+)\.dist-info", re.IGNORECASE)
    for folder in folders:
        for entry in files.names(folder):
            if match := fits.fullmatch(entry):
                yield folder / entry, match[1]


def _interpreter_of(script: Path, environ: Mapping[str, str], files: SeenFiles) -> str | None:
    """Read an installed script's first lines, the forms that pip and uv write."""
    try:
        head = files.read(script, _MAX_SCRIPT_BYTES).decode(errors="replace")
    except OSError:
        return None
    lines = [*head.split("\n"), "", ""]
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words and PurePath(words[0]).name == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return find_program(names[0], environ, files) if names else None
    if words and PurePath(words[0]).name == "sh" and lines[1].startswith("'''exec'"):
        # A path with blanks, or longer than the kernel takes: the shell starts the interpreter.
        try:
            words = shlex.split(lines[1].removeprefix("'''exec'"))
        except ValueError:
            return None
    is_python = bool(words) and _PYTHON.fullmatch(PurePath(words[0]).name)
    return words[0] if is_python else None


def _likely_dirs(python: Path, environ: Mapping[str, str], files: SeenFiles) -> Iterator[Path]:
    """Yield where packages are by convention: the search path, the user's, the prefix's."""
    for folder in environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder:
            yield Path(folder)
    prefix = python.absolute().parent.parent
    binary = files.resolve(python)
    match = _PYTHON.fullmatch(binary.name)
    version = match[1] if match and match[2] else "3.*"
    venv = _venv_settings(prefix, files)
    if venv is not None:
        yield from _site_dirs(prefix, version, files)
        if venv.get("include-system-site-packages") != "true":
            return
    elif home := _home(environ, files):
        yield from _site_dirs(Path(home, ".local"), version, files)
    base = binary.parent.parent
    yield from _site_dirs(base, version, files)
    yield from _versions(base / "local/lib", version, "dist-packages", files)
    yield base / "lib/python3/dist-packages"


def _home(environ: Mapping[str, str], files: SeenFiles) -> str:
    """Return where a user's packages are; without ``HOME`` Python asks the user database."""
    home = environ.get("HOME", "")
    if home or not files.may_run:  # another's server: neither its user nor its database is ours
        return home
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _site_dirs(prefix: Path, version: str, files: SeenFiles) -> Iterator[Path]:
    for lib in ("lib", "lib64"):
        yield from _versions(prefix / lib, version, "site-packages", files)


def _versions(lib: Path, version: str, name: str, files: SeenFiles) -> Iterator[Path]:
    for entry in files.names(lib):
        if fnmatchcase(entry, f"python{version}"):
            yield lib / entry / name


def _venv_settings(prefix: Path, files: SeenFiles) -> dict[str, str] | None:
    try:
        content = files.read(prefix / "pyvenv.cfg", _MAX_SETTINGS_BYTES)
    except OSError:
        return None
    pairs = (line.partition("=") for line in content.decode(errors="replace").splitlines())
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def _has_server(folder: Path, files: SeenFiles) -> bool:
    return any(is_dir(files, folder / name) for name in ("torch", "sglang", "nvidia/nccl"))


def _ask(python: str, environ: Mapping[str, str]) -> list[Path]:
    """Start the interpreter after all: a shim, a wheel house, a path hook."""
    answer = output_of([python, "-c", _ASK], environ, _ASK_TIMEOUT_S)
    return [Path(line) for line in (answer or "").splitlines() if line.startswith("/")]


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str | None:
    """Run a program and return what it prints; None where it fails or takes too long."""
    # Loaded here, for it is hardly ever needed and a launch waits for it.
    import subprocess

    try:
        return subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
