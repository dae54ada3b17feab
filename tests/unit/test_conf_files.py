from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccltune.host.conf_files import (
    NEUTRAL_VALUES,
    effective_settings,
    neutral_settings,
    parse_conf,
    read_conf_files,
)


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (b"NCCL_ALGO=Ring\nNCCL_PROTO=LL\n", {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}),
        (b"NCCL_ALGO=Ring", {"NCCL_ALGO": "Ring"}),
        (b"# NCCL_ALGO=Ring\n\n", {}),
        (b" # NCCL_ALGO=Ring\n", {" # NCCL_ALGO": "Ring"}),
        (b"  NCCL_ALGO=Ring\n", {"  NCCL_ALGO": "Ring"}),
        (b"NCCL_ALGO = Ring \n", {"NCCL_ALGO ": " Ring "}),
        (b"NCCL_PROTO=LL # small\n", {"NCCL_PROTO": "LL # small"}),
        (b'NCCL_ALGO="Ring"\n', {"NCCL_ALGO": '"Ring"'}),
        (b"export NCCL_ALGO=Ring\n", {"export NCCL_ALGO": "Ring"}),
        (b"NCCL_ALGO=Ring\r\n", {"NCCL_ALGO": "Ring\r"}),
        (b"NCCL_ALGO=\n", {"NCCL_ALGO": ""}),
        (b"NCCL_ALGO=a=b\n", {"NCCL_ALGO": "a=b"}),
        (b"NCCL_ALGO=first\nNCCL_ALGO=second\n", {"NCCL_ALGO": "first"}),
        (b"NCCL_ALGO\n=Ring\n", {}),
        (b"NCCL_ALGO=Ri\0ng\nNCCL_P\0=x\n", {"NCCL_ALGO": "Ri"}),
        (b"OMP_NUM_THREADS=1\n", {"OMP_NUM_THREADS": "1"}),
        (b"NCCL_ALGO=" + b"v" * 2000 + b"\n", {"NCCL_ALGO": "v" * 1023}),
        (b"N" * 2000 + b"=v\n", {"N" * 1023: "v"}),
        (b"", {}),
    ],
)
def test_parse_conf_reads_as_nccl_does(content: bytes, settings: dict[str, str]) -> None:
    assert parse_conf(content)[0] == settings


def test_parse_conf_keeps_bytes_that_are_no_text() -> None:
    settings, _ = parse_conf(b"NCCL_TOPO_FILE=/a\xff\n")

    assert os.fsencode(settings["NCCL_TOPO_FILE"]) == b"/a\xff"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"NCCL_PROTO=LL # small", "the comment becomes part of the value"),
        (b'NCCL_ALGO="Ring"', "the quotes become part of the value"),
        (b"NCCL_ALGO='Ring'", "the quotes become part of the value"),
        (b"NCCL_ALGO= Ring", "blanks around the value"),
        (b"NCCL_ALGO=Ring\t", "blanks around the value"),
        (b" NCCL_ALGO=Ring", "blanks around the name"),
        (b"NCCL_ALGO =Ring", "blanks around the name"),
        (b"export NCCL_ALGO=Ring", "'export' becomes part of the name"),
        (b"NCCL_ALGO=Ring\r", "carriage return"),
        (b"PATH=/bin", "not an NCCL variable"),
        (b"NCCL_ALGO", "no NAME=VALUE"),
        (b"=Ring", "no NAME=VALUE"),
        (b"NCCL_ALGO=" + b"v" * 1024, "cuts it to 1023 bytes"),
    ],
)
def test_parse_conf_with_surprise_names_line_and_text(line: bytes, problem: str) -> None:
    _, problems = parse_conf(b"# head\nNCCL_NTHREADS=64\n" + line + b"\n")

    assert len(problems) == 1
    assert problems[0].startswith("line 3: ")
    assert problem in problems[0]
    assert repr(os.fsdecode(line)[:20])[:-1] in problems[0]


def test_parse_conf_with_name_set_twice_says_that_the_first_holds() -> None:
    _, problems = parse_conf(b"NCCL_ALGO=Ring\nNCCL_ALGO=Tree\n")

    assert len(problems) == 1
    assert problems[0].startswith("line 2: ignored, an earlier line sets it")


@pytest.mark.parametrize("line", [b"NCCL_ALGO=Ring", b"NCCL_ALGO=", b"   ", b"# a = b"])
def test_parse_conf_without_surprise_has_no_problem(line: bytes) -> None:
    assert parse_conf(line + b"\n")[1] == ()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_read_conf_files_without_files_is_empty(home: Path, tmp_path: Path) -> None:
    assert read_conf_files({}, home, tmp_path / "etc.conf") == []
    assert read_conf_files({}, None, tmp_path / "etc.conf") == []


def test_read_conf_files_reads_home_before_etc(home: Path, tmp_path: Path) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    etc_path = tmp_path / "etc.conf"
    etc_path.write_text("NCCL_ALGO=Tree\nNCCL_GRAPH_FILE=/four.xml\n")

    files = read_conf_files({}, home, etc_path)

    assert [file.path for file in files] == [home / ".nccl.conf", etc_path]
    assert files[1].settings == {"NCCL_ALGO": "Tree", "NCCL_GRAPH_FILE": "/four.xml"}


@pytest.mark.parametrize(("variable", "expected"), [("named", "named"), ("", "home/.nccl.conf")])
def test_read_conf_files_with_named_file_skips_home(
    variable: str, expected: str, home: Path, tmp_path: Path
) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")
    (tmp_path / "named").write_text("NCCL_ALGO=Tree\n")
    environ = {"NCCL_CONF_FILE": str(tmp_path / variable) if variable else ""}

    files = read_conf_files(environ, home, tmp_path / "etc.conf")

    assert [file.path for file in files] == [tmp_path / expected]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("/nonexistent/nccl.conf", "does not exist"), ("~/nccl.conf", "does not expand '~'")],
)
def test_read_conf_files_with_missing_named_file_says_so(
    name: str, problem: str, home: Path, tmp_path: Path
) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")

    (file,) = read_conf_files({"NCCL_CONF_FILE": name}, home, tmp_path / "etc.conf")

    assert file.path == Path(name)
    assert file.settings == {}
    assert problem in file.problems[0]


def test_read_conf_files_with_unreadable_file_says_so(home: Path, tmp_path: Path) -> None:
    (home / ".nccl.conf").mkdir()

    (file,) = read_conf_files({}, home, tmp_path / "etc.conf")

    assert file.settings == {}
    assert "cannot be read" in file.problems[0]


def test_read_conf_files_with_null_device_is_empty_and_fine(home: Path, tmp_path: Path) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Ring\n")

    (file,) = read_conf_files({"NCCL_CONF_FILE": os.devnull}, home, tmp_path / "etc.conf")

    assert (file.settings, file.problems) == ({}, ())


def test_effective_settings_follow_the_precedence(home: Path, tmp_path: Path) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_PROTO=LL\n")
    etc_path = tmp_path / "etc.conf"
    etc_path.write_text("NCCL_ALGO=Tree\nNCCL_NTHREADS=64\nNCCL_DEBUG=INFO\n")
    environ = {"NCCL_PROTO": "Simple", "NCCL_DEBUG": ""}

    effective = effective_settings(read_conf_files(environ, home, etc_path), environ)

    assert effective == {
        "NCCL_ALGO": ("Ring", home / ".nccl.conf"),
        "NCCL_NTHREADS": ("64", etc_path),
    }


def test_neutral_settings_are_empty_where_nccl_takes_that_for_unset() -> None:
    names = ["NCCL_ALGO", "NCCL_P2P_LEVEL", "OMP_NUM_THREADS"]

    assert neutral_settings(names) == dict.fromkeys(names, "")


def test_neutral_settings_name_a_harmless_value_where_empty_would_fail() -> None:
    assert neutral_settings(["NCCL_GRAPH_FILE"]) == {"NCCL_GRAPH_FILE": "/dev/null"}
    assert all(NEUTRAL_VALUES.values())
