from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nccltune.errors import FileError
from nccltune.host.conf_files import read_conf_files
from nccltune.payloads.model_config import load_model_shape
from nccltune.recording.finding import load_recording
from nccltune.regular_files import read_regular
from nccltune.sglang.command import parse_launch


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)
    return path


def test_read_regular_returns_all_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")

    assert read_regular(path, 5) == b"12345"


def test_read_regular_refuses_a_device() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(Path("/dev/zero"), 10)


def test_read_regular_takes_the_null_device_for_an_empty_file() -> None:
    assert read_regular(Path(os.devnull), 10) == b""


def test_read_regular_refuses_a_pipe_at_once(pipe: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(pipe, 10)


def test_read_regular_refuses_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "gone", 10)


def test_read_regular_refuses_more_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes((1 << 20) + 1))

    with pytest.raises(OSError, match="larger than 1 MiB") as caught:
        read_regular(path, 1 << 20)
    assert caught.value.errno == errno.EFBIG


def test_pipe_in_place_of_an_input_file_is_refused_everywhere(pipe: Path) -> None:
    with pytest.raises(FileError, match="not a regular file"):
        load_model_shape(pipe)
    with pytest.raises(FileError, match="not a regular file"):
        load_recording(pipe)
    with pytest.raises(FileError, match="not a regular file"):
        parse_launch(["sglang", "serve", "--config", str(pipe)])


def test_pipe_in_place_of_a_conf_file_is_a_problem_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".nccl.conf")

    (file,) = read_conf_files({}, tmp_path, tmp_path / "none")

    assert file.settings == {}
    assert "not a regular file" in file.problems[0]
