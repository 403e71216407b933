"""A preset's folder is replaced whole: old or new, whatever happens."""

import errno
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b.weights import preset_folder
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.preset_folder import replacing_folder
from keras_vit22b.weights.shards import Shards
from keras_vit22b.weights.verification import verify_folder


@pytest.fixture
def folder(tmp_path):
    """A preset's path, with a file in it."""
    folder = tmp_path / "preset"
    folder.mkdir()
    (folder / "config.json").write_text('{"age": "old"}')
    return folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def save(folder, **files):
    with replacing_folder(folder) as new:
        for name, text in files.items():
            (new / f"{name}.json").write_text(text)


# === Reading ===


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/hostname", "a/b", "a\\b", "C:a", "..", ""]
)
def test_only_plain_names_are_opened(folder, name):
    with PresetFolder(folder / ".." / "preset") as opened:
        with pytest.raises(ValueError, match="not the plain name"):
            opened.open(name)


def test_a_folder_may_itself_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to("preset")
    with PresetFolder(tmp_path / "link") as opened:
        assert opened.read_json("config.json") == {"age": "old"}
        assert opened.source == str(tmp_path / "link")


def test_links_may_lead_into_the_blobs_and_nowhere_else(folder, tmp_path):
    """As in the Hub's cache: a snapshot's files are links to blobs."""
    for name in ("blobs", "blobs/deeper", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("{}")
    links = {
        "good": "../blobs/file",
        "deep": "../blobs/deeper/file",
        "out": "../elsewhere/file",
        "through": "../blobs/../elsewhere/file",
        "absolute": tmp_path / "elsewhere" / "file",
        "system": "/proc/self/environ",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with PresetFolder(folder, blobs=[tmp_path / "blobs"]) as opened:
        for name in ("good", "deep"):
            assert opened.read_json(name) == {}
        for name in links.keys() - {"good", "deep"}:
            with pytest.raises(ValueError, match="leads out of its folder"):
                opened.open(name)
    with PresetFolder(folder) as opened:
        with pytest.raises(ValueError, match="leads out of its folder"):
            opened.read_json("good")


def test_what_is_no_folder_is_refused(folder, tmp_path):
    for path in (tmp_path / "none", folder / "config.json"):
        with pytest.raises(ValueError, match="There is no folder"):
            PresetFolder(path)


def test_no_file_stays_open(folder):
    held = len(os.listdir("/proc/self/fd"))
    (folder / "link").symlink_to("/etc/hostname")
    with PresetFolder(folder) as opened:
        assert opened.has("config.json")
        assert not opened.has("none.json")
        for name in ("link", "."):
            with pytest.raises(ValueError):
                opened.has(name)
    assert len(os.listdir("/proc/self/fd")) == held


# === Replacing ===


def test_what_no_save_makes_is_kept(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "training.json").write_text("mine too")
    (folder / "tokens.safetensors").write_text("also mine")
    (folder / "link").symlink_to("notes.txt")
    save(folder, config="new")
    assert (folder / "config.json").read_text() == "new"
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "training.json").read_text() == "mine too"
    assert (folder / "tokens.safetensors").read_text() == "also mine"
    assert os.readlink(folder / "link") == "notes.txt"


def test_what_an_older_save_made_is_not_kept(folder):
    names = [
        "image_converter.json",
        "metadata.json",
        "preprocessor.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "model.weights.json",
    ]
    for name in names:
        (folder / name).write_text("old")
    save(folder, config="new")
    assert contents(folder) == {"config.json": b"new"}


def test_a_file_that_is_saved_goes_before_one_that_is_kept(folder):
    (folder / "README.md").write_text("old")
    with replacing_folder(folder) as new:
        (new / "README.md").write_text("new")
    assert contents(folder) == {"README.md": b"new"}


def test_nothing_but_the_folder_is_left(folder):
    save(folder, config="new")
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder):
        raise KeyboardInterrupt
    assert os.listdir(folder.parent) == ["preset"]
    assert contents(folder) == {"config.json": b"new"}


def test_folders_above_are_made(tmp_path):
    save(tmp_path / "a" / "b", config="new")
    assert contents(tmp_path / "a" / "b") == {"config.json": b"new"}


def test_a_link_to_the_folder_stays_a_link(folder, tmp_path):
    (tmp_path / "latest").symlink_to("preset")
    save(tmp_path / "latest", config="new")
    assert os.readlink(tmp_path / "latest") == "preset"
    assert contents(folder) == {"config.json": b"new"}


def test_a_relative_path_is_where_it_was_at_the_start(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with replacing_folder("preset") as new:
        monkeypatch.chdir("/")
        (new / "config.json").write_text("new")
    assert contents(folder) == {"config.json": b"new"}


def test_a_name_with_special_characters_is_a_name(tmp_path):
    folder = tmp_path / "vit[1]*?"
    for text in ("old", "new"):
        save(folder, config=text)
        leave_behind(folder, pid_of_the_dead())
    save(folder, config="newer")
    assert os.listdir(tmp_path) == [folder.name]


def leave_behind(folder, pid, host=None):
    """Make what a killed save leaves; return its path."""
    owner = f"{host or socket.gethostname()}-{pid}"
    path = preset_folder.staging_path(folder, owner)
    path.mkdir()
    (path / "model.safetensors").write_text("half")
    return path


def pid_of_the_dead():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_of_the_dead_alone_are_removed(folder):
    dead = leave_behind(folder, pid_of_the_dead())
    alive = leave_behind(folder, os.getppid())
    elsewhere = leave_behind(folder, pid_of_the_dead(), host="another.host")
    other = leave_behind(folder.with_name("preset.b"), pid_of_the_dead())
    save(folder, config="new")
    assert not dead.exists()
    for path in (alive, elsewhere, other):
        assert os.listdir(path) == ["model.safetensors"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_folders_are_replaced_where_no_exchange_is(folder, monkeypatch, number):
    def refuse(new, old):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preset_folder, "_exchange", refuse)
    save(folder, config="new")
    assert contents(folder) == {"config.json": b"new"}
    assert os.listdir(folder.parent) == ["preset"]


def test_another_error_of_the_exchange_changes_nothing(folder, monkeypatch):
    def refuse(new, old):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(preset_folder, "_exchange", refuse)
    with pytest.raises(PermissionError):
        save(folder, config="new")
    assert contents(folder) == {"config.json": b'{"age": "old"}'}
    assert os.listdir(folder.parent) == ["preset"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY])
def test_a_mount_point_is_left_as_it_is(folder, monkeypatch, number):
    def refuse(new, old):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preset_folder, "_exchange", refuse)
    with pytest.raises(ValueError, match="preset is a mount point.*below it"):
        save(folder, config="new")
    assert contents(folder) == {"config.json": b'{"age": "old"}'}
    assert os.listdir(folder.parent) == ["preset"]


def test_a_mount_point_is_refused_before_anything_is_written():
    with pytest.raises(ValueError, match="/proc is a mount point.*below it"):
        with replacing_folder("/proc"):
            raise AssertionError("Written to.")


def test_all_is_on_disk_before_it_is_put_in_place(folder, monkeypatch):
    events = []
    fsync, exchange = os.fsync, preset_folder._exchange

    def sync(fd):
        events.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def swap(new, old):
        events.append("exchange")
        exchange(new, old)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(preset_folder, "_exchange", swap)
    save(folder, config="new", metadata="new")
    staging = str(preset_folder.staging_path(folder))
    before, after = events[: events.index("exchange")], events[-1]
    assert sorted(before) == [
        staging,
        f"{staging}/config.json",
        f"{staging}/metadata.json",
    ]
    assert before[-1] == staging
    assert after == str(folder.parent)


# === Readers while a save replaces the folder ===


@pytest.fixture
def save_numbers(make_backbone):
    """Save a backbone of which each number is that number."""
    backbones = {}
    for number in (1.0, 2.0):
        backbones[number] = make_backbone()
        for weight in backbones[number].weights:
            weight.assign(np.full(weight.shape, number))

    def save_numbers(number, path):
        backbones[number].save_to_preset(path, max_shard_size=600)

    return save_numbers


def test_a_reader_sees_no_mix_whenever_the_folder_is_replaced(
    tmp_path, save_numbers, monkeypatch
):
    """A save in the middle of a load, before each file that it opens.

    The load gives the old preset or the new one, or says what is gone.
    """
    path, moments = tmp_path / "preset", 0
    save_numbers(1.0, path)
    plain_open = PresetFolder.open

    def count(folder, name):
        nonlocal moments
        moments += 1
        return plain_open(folder, name)

    monkeypatch.setattr(PresetFolder, "open", count)
    assert values(ViT22BBackbone.from_preset(path)) == {1.0}
    for moment in range(1, moments + 1):
        monkeypatch.setattr(PresetFolder, "open", plain_open)
        save_numbers(1.0, path)
        left = moment

        def replace_then_open(folder, name):
            nonlocal left
            left -= 1
            if left == 0:
                save_numbers(2.0, path)
            return plain_open(folder, name)

        monkeypatch.setattr(PresetFolder, "open", replace_then_open)
        try:
            numbers = values(ViT22BBackbone.from_preset(path))
        except ValueError as error:
            assert "was replaced while it was read. Load again" in str(error)
            numbers = {None}
        assert len(numbers) == 1, f"a mix at opening {moment}"


def values(backbone):
    return {float(v) for w in backbone.weights for v in np.ravel(w.value)}


def test_an_open_file_is_read_to_its_end_though_it_is_replaced(
    tmp_path, save_numbers
):
    path = tmp_path / "preset"
    save_numbers(1.0, path)
    with PresetFolder(path) as folder:
        for file, names in Shards(folder).by_file(["final_norm.scale"]):
            save_numbers(2.0, path)
            assert {v for n in names for v in file.read(n).ravel()} == {1.0}


def test_threads_that_save_at_once_take_turns(make_backbone, tmp_path):
    backbones = [make_backbone(random=True) for _ in range(2)]
    path = tmp_path / "preset"
    for _ in range(4):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda b: b.save_to_preset(path), backbones))
        verify_folder(path)
    assert [p.name for p in tmp_path.iterdir()] == ["preset"]
