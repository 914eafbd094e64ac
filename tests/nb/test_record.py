"""Where records lie, and how a file is written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from llm_systems_cookbook.nb.record import results_folder, write_atomic


@pytest.mark.parametrize(
    ("chosen", "folder"),
    [("", "{root}/results"), ("here", "{cwd}/here"), ("~/a", "{home}/a")],
)
def test_records_lie_in_the_repository_or_where_the_variable_says(
    tmp_path, monkeypatch, chosen, folder
):
    home, root = tmp_path / "home", tmp_path / "root"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("COOKBOOK_RESULTS", chosen)
    expected = folder.format(root=root, cwd=Path.cwd(), home=home)
    assert results_folder(root) == Path(expected)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_that_the_user_asks_for(tmp_path):
    write_atomic(tmp_path / "a.txt", "new")
    (tmp_path / "b.txt").write_text("plain")
    written, plain = (
        stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("a.txt", "b.txt")
    )
    assert written == plain


def test_a_symbolic_link_still_points_to_the_written_file(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
