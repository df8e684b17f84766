"""Where compiled kernels lie: this user's alone, and known again at the next start."""

import os
from pathlib import Path

import pytest

from stoker.backends.gpu import kernel_cache
from stoker.backends.gpu.kernel_cache import complete, kernel_folder, mark_complete, start_key
from stoker.errors import StokerError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "environ", os.environ)  # what is set there goes with the test
    return tmp_path


def test_the_folder_is_this_users_alone_and_triton_is_told_of_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_cache.VARIABLE, "")  # remembered, so that it is undone
    folder = kernel_folder()
    assert folder == home / "stoker" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ[kernel_cache.VARIABLE] == str(folder)
    folder.chmod(0o777)
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    kernel_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_the_environment_names_is_used_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_cache.VARIABLE, str(home / "mine"))
    assert kernel_folder() == home / "mine"


def test_a_folder_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "stoker").mkdir()
    (home / "elsewhere").mkdir()
    (home / "stoker" / "kernels").symlink_to(home / "elsewhere")
    with pytest.raises(StokerError, match="not a directory of this user"):
        kernel_folder()
    (home / "stoker" / "kernels").unlink()
    (home / "stoker" / "kernels").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(StokerError, match="not a directory of this user"):
        kernel_folder()


def test_a_start_is_known_again_until_something_changes_that_kernels_depend_on(home: Path) -> None:
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"123")
    key = start_key(model, "sizes", 1)
    assert not complete(home, key)
    mark_complete(home, key)
    assert complete(home, start_key(model, "sizes", 1))
    assert start_key(model, "sizes", 2) != key
    (model / "model.safetensors").write_bytes(b"1234")
    assert start_key(model, "sizes", 1) != key
    (model / "model.safetensors").write_bytes(b"321")
    assert start_key(model, "sizes", 1) == key
    (model / "config.json").write_text('{"hidden_size": 64}')
    assert start_key(model, "sizes", 1) != key
