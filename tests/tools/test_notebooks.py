"""Selecting notebooks by name, and reading them as they are."""

import pytest

from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    notebook_paths,
    select_notebooks,
)


@pytest.fixture
def three(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for stem in ("02_block_tables", "01_kv_cache", "10_free"):
        (folder / f"{stem}.ipynb").touch()
    return tmp_path


def stems(paths):
    return [path.stem for path in paths]


def test_without_names_all_notebooks_come_in_order(three):
    chosen = select_notebooks(three, [])
    assert stems(chosen) == ["01_kv_cache", "02_block_tables", "10_free"]


@pytest.mark.parametrize(
    "name", ["02", "02_block_tables", "02_block_tables.ipynb"]
)
def test_a_number_a_stem_and_a_file_name_find_a_notebook(three, name):
    assert stems(select_notebooks(three, [name])) == ["02_block_tables"]


def test_a_path_finds_a_notebook_from_the_working_directory(
    three, monkeypatch
):
    monkeypatch.chdir(three)
    chosen = select_notebooks(three, ["notebooks/10_free.ipynb"])
    assert chosen == [three.resolve() / "notebooks" / "10_free.ipynb"]


def test_a_notebook_asked_for_twice_comes_once(three):
    chosen = select_notebooks(three, ["10", "01", "10_free"])
    assert stems(chosen) == ["10_free", "01_kv_cache"]


@pytest.mark.parametrize("name", ["03", "0", "1", "block_tables", "", "02_"])
def test_an_unknown_name_is_an_error_that_lists_the_choices(three, name):
    choices = "01_kv_cache, 02_block_tables, 10_free"
    with pytest.raises(CookbookError, match=choices):
        select_notebooks(three, [name])


def test_a_number_of_two_notebooks_is_an_error_that_lists_them(three):
    (three / "notebooks" / "02_other.ipynb").touch()
    with pytest.raises(CookbookError, match=r"02_block_tables, 02_other$"):
        select_notebooks(three, ["02"])


def test_two_notebooks_with_one_record_are_an_error(three):
    twin = three / "01_kv_cache.ipynb"
    twin.touch()
    with pytest.raises(CookbookError, match="would write the same record"):
        select_notebooks(three, ["01", str(twin)])


def test_a_name_that_cannot_name_a_record_is_an_error(three):
    (three / "notebooks" / "03 a b.ipynb").touch()
    with pytest.raises(CookbookError, match=r"03 a b\.ipynb"):
        select_notebooks(three, [])


def test_a_repository_without_notebooks_is_an_error(tmp_path):
    with pytest.raises(CookbookError, match="no notebooks in"):
        select_notebooks(tmp_path, [])


def test_hidden_copies_of_an_editor_are_no_notebooks(three):
    for name in (".~10_free.ipynb", "._10_free.ipynb"):
        (three / "notebooks" / name).write_bytes(b"\x00")
    assert len(notebook_paths(three)) == 3
