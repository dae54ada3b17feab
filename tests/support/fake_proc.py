"""A procfs of made-up processes: folders and files as the kernel lays them out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BOOT_ID = "11111111-2222-3333-4444-555555555555"
TICKS = 5000
EXITING = 0x4
FORKED = 0x40
"""Has called no exec since its fork."""


class FakeProc:
    """Processes come and go with ``add`` and ``remove``."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "proc"
        kernel = self.root / "sys/kernel/random"
        kernel.mkdir(parents=True)
        (kernel / "boot_id").write_text(f"{BOOT_ID}\n", encoding="ascii")
        (self.root / "uptime").write_text("1.0 1.0\n", encoding="ascii")

    @classmethod
    def with_init(cls, folder: Path) -> FakeProc:
        """Return one with a first process, which takes over orphans."""
        fake = cls(folder)
        fake.add(1, ["/sbin/init"], parent=0)
        return fake

    @classmethod
    def at(cls, root: Path) -> FakeProc:
        """Return the one that is there already."""
        found = cls.__new__(cls)
        found.root = root
        return found

    def add(
        self,
        pid: int,
        argv: Sequence[str],
        *,
        parent: int = 1,
        ticks: int = TICKS,
        environ: Mapping[str, str] | None = None,
        state: str = "S",
        name: str = "python3",
        session: int = 0,
        numbers: Sequence[int] = (),
        flags: int = 0,
        uid: int | None = None,
        links: Mapping[str, Path] | None = None,
    ) -> None:
        """Add a process, or replace it as ``exec`` does.

        Args:
            uid: of its user; the one that runs the tests if None.
            links: where ``root``, ``cwd`` and ``exe`` lead, where not to the usual places.
        """
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = [state, parent, pid, session or pid, 0, 0, flags, *([0] * 12), ticks, *([0] * 30)]
        stat = f"{pid} ({name}) {' '.join(map(str, fields))}\n"
        (folder / "stat").write_text(stat, encoding="utf-8")
        (folder / "cmdline").write_bytes(_block(argv))
        entries = [f"{key}={value}" for key, value in (environ or {}).items()]
        (folder / "environ").write_bytes(_block(entries))
        inside = "\t".join(map(str, (pid, *numbers)))
        user = "\t".join([str(os.geteuid() if uid is None else uid)] * 4)
        status = f"Name:\t{name}\nUid:\t{user}\nGid:\t{user}\nGroups:\t\nNSpid:\t{inside}\n"
        (folder / "status").write_text(status, encoding="utf-8")
        usual = {"root": Path("/"), "cwd": Path("/"), "exe": Path(sys.executable).resolve()}
        for link, target in {**usual, **(links or {})}.items():
            (folder / link).unlink(missing_ok=True)
            (folder / link).symlink_to(target)

    def add_rank(
        self,
        pid: int,
        name: str,
        *,
        parent: int,
        environ: Mapping[str, str] | None = None,
        session: int = 0,
        ticks: int = TICKS,
        flags: int = 0,
        links: Mapping[str, Path] | None = None,
    ) -> None:
        """Add a rank with its title; without an environment it is wiped."""
        title = f"sglang::scheduler_{name}" if name else "sglang::scheduler"
        self.add(
            pid,
            [title],
            parent=parent,
            environ=environ,
            session=session,
            ticks=ticks,
            flags=flags,
            links=links,
        )
        (self.root / str(pid) / "cmdline").write_bytes(title.encode() + b"\0" * 200)
        if environ is None:
            (self.root / str(pid) / "environ").write_bytes(b"\0" * 500)

    def listen(self, pid: int, port: int, *, inode: int = 4711, is_own: bool = True) -> None:
        """Let somebody listen on a port, as the process's network namespace shows it."""
        folder = self.root / str(pid)
        (folder / "net").mkdir(exist_ok=True)
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        line = (
            f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000"
            f"     0        0 {inode} 1 0000000000000000 100 0 0 10 0\n"
        )
        (folder / "net/tcp").write_text(head + line, encoding="ascii")
        (folder / "fd").mkdir(exist_ok=True)
        if is_own:
            (folder / "fd" / "7").symlink_to(f"socket:[{inode}]")

    def write_to(self, pid: int, path: Path, *, flags: int = 0o100001) -> None:
        """Let a process write its output to a file."""
        folder = self.root / str(pid)
        for name in ("fd", "fdinfo"):
            (folder / name).mkdir(exist_ok=True)
        for number in ("1", "2"):
            (folder / "fd" / number).symlink_to(path)
            text = f"pos:\t0\nflags:\t{flags:o}\n"
            (folder / "fdinfo" / number).write_text(text, encoding="ascii")

    def redirect(self, pid: int, number: str, path: str | Path) -> None:
        """Let one of a process's outputs, which ``write_to`` has set, lead elsewhere."""
        output = self.root / str(pid) / "fd" / number
        output.unlink()
        output.symlink_to(path)

    def begin_to_end(self, pid: int, *, has_words: bool = False) -> None:
        """Leave a process as one that is ending: running by its state, its memory gone or going.

        Args:
            has_words: its command line can still be read.
        """
        stat, cmdline = self.root / str(pid) / "stat", self.root / str(pid) / "cmdline"
        words, content = stat.read_text(encoding="utf-8").split(), cmdline.read_bytes()
        ticks, parent, session = int(words[21]), int(words[3]), int(words[5])
        self.add(pid, [], parent=parent, session=session, ticks=ticks, state="D", flags=EXITING)
        if has_words:
            cmdline.write_bytes(content)

    def begin_exec(self, pid: int) -> None:
        """Leave a process amid ``exec``: it lives on, with neither words nor environment."""
        for name in ("cmdline", "environ"):
            (self.root / str(pid) / name).write_bytes(b"")

    def remove(self, *pids: int) -> None:
        """End processes."""
        for pid in pids:
            folder = self.root / str(pid)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            folder.rmdir()


def _block(words: Sequence[str]) -> bytes:
    return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
