"""Boots a real systemd in a container of its own: a cached Debian root folder, layers over it.

Needs root and the Debian packages debootstrap and systemd-container. The root folder comes from the
mirror that this machine's own apt sources name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CACHE_DIR = Path(os.environ.get("NCCLTUNE_TEST_CACHE", "/var/tmp/nccltune-tests"))
SUITE = "bookworm"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv")
ROOT = "root"
"""Name of the root folder in each layer. It is no mount point by itself, because systemd-nspawn
makes its throw-away copy inside such a one, where the copy copies itself until the disk is full."""

TOOLS = ("debootstrap", "systemd-nspawn", "nsenter", "unshare")

BOOT_TIMEOUT_S = 60.0
POWER_OFF_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
_POLL_S = 0.05
_CLEAN_ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_IS_UP = ("running", "degraded")


def missing_condition() -> str:
    """Return what this machine lacks for booting containers; empty if nothing."""
    if os.geteuid() != 0:
        return "booting a container needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: debootstrap systemd-container)"
    return ""


@contextlib.contextmanager
def cache_lock(name: str) -> Iterator[Path]:
    """Hold one entry of the cache while it is made, against other test runs."""
    CACHE_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = CACHE_DIR.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RuntimeError(f"{CACHE_DIR} is not a folder of this user")
    with (CACHE_DIR / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield CACHE_DIR / name


def base_folder() -> Path:
    """Return a layer with Debian, systemd and Python; made once, then cached."""
    with cache_lock(f"{SUITE}-base") as folder:
        if folder.is_dir():
            return folder
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        include = f"--include={','.join(PACKAGES)}"
        partial.mkdir()
        target = [SUITE, str(partial / ROOT), find_mirror()]
        command = ["debootstrap", "--variant=minbase", include, *target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"debootstrap failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        shutil.rmtree(partial / ROOT / "var/cache/apt")
        partial.rename(folder)
        return folder


def find_mirror() -> str:
    """Return the address that this machine's apt takes the suite's main packages from."""
    wanted = "$(TARGET_OF) $(CODENAME) $(COMPONENT) $(ARCHITECTURE) $(REPO_URI)"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        target, codename, component, _, address = line.split(maxsplit=4)
        if (target, codename, component) == ("deb", SUITE, "main"):
            return address
    raise RuntimeError(f"no apt source of this machine has {SUITE} main")


@dataclass
class Layers:
    """Folders on top of one another, the uppermost writable: one root folder for a container.

    Attributes:
        folder: where the writable layer and the mount point are made.
        lower: read-only layers, uppermost first, each with a folder named ``ROOT``.
    """

    folder: Path
    lower: Sequence[Path]

    def __post_init__(self) -> None:
        for part in (self.upper / ROOT, self._work, self.merged):
            part.mkdir(parents=True, exist_ok=True)

    @property
    def upper(self) -> Path:
        """The writable layer; files may be put there while no container runs."""
        return self.folder / "upper"

    @property
    def merged(self) -> Path:
        return self.folder / "merged"

    @property
    def _work(self) -> Path:
        return self.folder / "work"

    def write(self, path: str, text: str, mode: int = 0o644) -> Path:
        """Put a file into the writable layer."""
        file = self.upper / ROOT / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def nspawn_command(self, *arguments: str) -> list[str]:
        """Return the command that runs systemd-nspawn here.

        The layers are mounted in a mount namespace of its own, so that they are gone with it.
        """
        lower = ":".join(str(layer) for layer in self.lower)
        options = f"lowerdir={lower},upperdir={self.upper},workdir={self._work}"
        script = 'mount -t overlay overlay -o "$1" "$2" && shift 2 && exec systemd-nspawn "$@"'
        own = ["--quiet", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"]
        own += ["--private-network", "--directory", str(self.merged / ROOT)]
        unshared = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        return [*unshared, options, str(self.merged), *own, *arguments]

    def run(
        self,
        *command: str,
        binds: Mapping[Path, str] | None = None,
        network: bool = False,
        timeout_s: float = 600.0,
    ) -> str:
        """Run one command in the layers, without booting; return what it printed."""
        arguments = ["--pipe", *_bind_options(binds), "--", *command]
        full = self.nspawn_command(*arguments)
        if network:
            full.remove("--private-network")
        done = subprocess.run(
            full, env=_CLEAN_ENVIRON, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout


def _bind_options(binds: Mapping[Path, str] | None) -> list[str]:
    return [f"--bind={host}:{inside}" for host, inside in (binds or {}).items()]


@dataclass
class Machine:
    """A container that runs: an own systemd, or one command beside a stub init.

    Attributes:
        process: systemd-nspawn, outside.
        console_path: everything that the container printed.
    """

    process: subprocess.Popen[bytes]
    console_path: Path
    started_at: float = field(default_factory=time.monotonic)

    @property
    def console(self) -> str:
        return self.console_path.read_text(errors="replace")

    @property
    def leader(self) -> int:
        """Process id of the container's first process, as seen from outside."""
        while self.process.poll() is None:
            children = _children(self.process.pid)
            if children and _is_in_own_namespace(children[0]):
                return children[0]
            time.sleep(_POLL_S)
        raise RuntimeError(f"the container is gone:\n{self.console[-4000:]}")

    @property
    def root(self) -> Path:
        """The container's root folder, as seen from outside while it runs."""
        return Path(f"/proc/{self.leader}/root")

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root, with a clean environment."""
        enter = ["nsenter", f"--target={self.leader}", "--mount", "--pid", "--net", "--ipc"]
        done = subprocess.run(
            [*enter, "--uts", "--root", "--wd=/", "--", *command],
            env={**_CLEAN_ENVIRON, **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def wait_until_up(self) -> float:
        """Wait for systemd to finish booting; return the seconds that it took."""
        deadline = self.started_at + BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            done = self.run("systemctl", "is-system-running", "--wait", check=False)
            if done.stdout.strip() in _IS_UP:
                return time.monotonic() - self.started_at
            time.sleep(_POLL_S)
        raise RuntimeError(f"did not boot in {BOOT_TIMEOUT_S:.0f} s:\n{self.console[-4000:]}")

    def power_off(self) -> None:
        """Shut down as an operator does, and wait until every process is gone."""
        self.run("systemctl", "poweroff", check=False)
        self.process.wait(POWER_OFF_TIMEOUT_S)

    def journal(self, *arguments: str) -> str:
        """Return the journal, messages only."""
        return self.run("journalctl", "--no-pager", "--output=cat", *arguments).stdout

    def processes(self) -> list[int]:
        """Return process ids inside, as seen from outside, the first process first."""
        found, waiting = [], [self.leader]
        while waiting:
            pid = waiting.pop(0)
            found.append(pid)
            waiting += _children(pid)
        return found

    def kill(self) -> None:
        """End the container as a power cut does."""
        if self.process.poll() is None:
            with contextlib.suppress(RuntimeError, ProcessLookupError):
                os.kill(self.leader, signal.SIGKILL)
        try:
            self.process.wait(POWER_OFF_TIMEOUT_S)  # it removes what was to be thrown away
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def start(
    layers: Layers,
    *command: str,
    is_ephemeral: bool = False,
    binds: Mapping[Path, str] | None = None,
) -> Iterator[Machine]:
    """Start a container: boot its systemd, or run the command as process 2 beside a stub init.

    Args:
        layers: its root folder.
        command: nothing to boot.
        is_ephemeral: throw everything away that is written, binds aside.
        binds: folders of this machine, and where they are inside.
    """
    arguments = ["--ephemeral"] if is_ephemeral else []
    arguments += _bind_options(binds)
    arguments += ["--as-pid2", "--", *command] if command else ["--boot"]
    layers.folder.mkdir(exist_ok=True)
    console_path = layers.folder / "console.log"
    with console_path.open("wb") as console:
        process = subprocess.Popen(
            layers.nspawn_command(*arguments),
            env=_CLEAN_ENVIRON,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    machine = Machine(process, console_path)
    try:
        yield machine
    finally:
        machine.kill()


def _children(pid: int) -> list[int]:
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _is_in_own_namespace(pid: int) -> bool:
    """Whether this is the container's process already, with its root folder in place."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False
