"""A folder that cannot be written is refused in one line, and before the work if asked to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab import runfolder
from shardlab.errors import UsageError


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder to write to"):
        runfolder.refuse_unwritable(tmp_path / "file" / "x")
    with pytest.raises(UsageError, match="cannot write the run folder"):
        runfolder.new_folder(tmp_path, "plan", tmp_path / "file" / "x")


def test_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    runfolder.refuse_unwritable(tmp_path / "a" / "b")
    assert runfolder.new_folder(tmp_path, "plan", tmp_path / "a" / "b").is_dir()
