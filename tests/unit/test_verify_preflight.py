"""What is looked at before the first server of a verify is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.verify.serving import preflight
from tests.support.verifying import make_spec

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.parametrize("words", [("A=1",), ("-u", "CUDA_VISIBLE_DEVICES"), ("-i", "A=1")])
def test_host_and_packages_are_looked_at_as_the_server_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    looked: list[Mapping[str, str]] = []

    def host_of(_python: str | None, environ: Mapping[str, str]) -> tuple[None, str]:
        looked.append(environ)
        return None, "no GPU"

    def package_dirs(_python: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
        looked.append(environ)
        return ()

    monkeypatch.setattr(preflight, "host_of", host_of)
    monkeypatch.setattr(preflight, "package_dirs", package_dirs)
    spec = make_spec(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "3,2"})

    launch = ("env", *words, *spec.launch)
    preflight.prepare(replace(spec, launch=launch, arms=spec.arms[:1]))

    given = {} if "-i" in words else dict(spec.environ)
    if "-u" in words:
        del given["CUDA_VISIBLE_DEVICES"]
    assert looked == [given | ({"A": "1"} if "A=1" in words else {})] * 2
