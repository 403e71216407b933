"""A save, a push and a pull are killed at random moments; nobody sees a mix.

What is killed is done again, and ends as if nothing had been. Each attempt has
a process of its own: a fork, so that Keras is loaded once.
"""

import hashlib
import pathlib
import random

import numpy as np
import pytest
from hub_server import Fault

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageConverter

pytestmark = pytest.mark.any_backend

KILLS = 10
BOTH = pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])

# For the client. `moments` are fractions of the time that a whole attempt
# takes. `act(n)` does all for the n-th time; `look(n)` says what a reader sees
# meanwhile.
KILL = """
import shutil, signal, time, warnings
warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks.


def attempt_in_fork(act, look, kill_after=None):
    "Return exit code, seconds, and the set of what was seen."
    seen, started = set(), time.monotonic()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(60)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    done, code = 0, None
    while not done:
        if kill_after and time.monotonic() - started > kill_after:
            os.kill(pid, signal.SIGKILL)
            kill_after = None
        else:
            seen.add(look())
            time.sleep(0.002)
        done, code = os.waitpid(pid, os.WNOHANG)
    seconds = time.monotonic() - started
    return os.waitstatus_to_exitcode(code), seconds, seen | {look()}


def kill_at(moments, act, look, inspect=lambda n: None):
    whole = [
        attempt_in_fork(lambda: act(n), lambda: look(n)) for n in range(2)
    ]
    assert [code for code, *_ in whole] == [0, 0]
    seconds = min(seconds for _, seconds, _ in whole)
    rows = [{"seen": [*seen]} for *_, seen in whole]
    for n, moment in enumerate(moments, 2):
        code, _, seen = attempt_in_fork(
            lambda: act(n), lambda: look(n), moment * seconds
        )
        left = inspect(n)
        again, _, more = attempt_in_fork(lambda: act(n), lambda: look(n))
        rows.append({
            "killed": code == -9, "code": code, "again": again,
            "seen": [*seen | more], "end": look(n), "left": left,
        })
    return rows


def digest_of_files(folder):
    sha256 = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha256.update(path.name.encode() + path.read_bytes())
    return sha256.hexdigest()
"""


def random_moments(seed):
    """Fractions of the whole, one in each tenth of it, in any order."""
    generator = random.Random(seed)
    moments = [(n + generator.random()) / KILLS for n in range(KILLS)]
    generator.shuffle(moments)
    return moments


def assert_nobody_saw_a_mix(rows, allowed):
    """Each row of `kill_at` ends with the new preset."""
    assert len(rows) == KILLS + 2
    for row in rows:
        assert set(row["seen"]) <= allowed, rows
    rows = rows[2:]
    assert {row["code"] for row in rows} <= {0, -9}, rows
    assert {(row["again"], row["end"]) for row in rows} == {(0, "new")}, rows
    # A moment falls after the end if the first attempts were slower.
    assert sum(row["killed"] for row in rows) >= 3, rows


@pytest.fixture(scope="module")
def make_preset():
    """Save a preset of 170 kB in five shards, with other weights each time."""
    backbone = ViT22BBackbone(
        (8, 8, 3), 4, num_layers=1, num_heads=2, hidden_dim=48, mlp_dim=192
    )
    backbone.image_converter = ViT22BImageConverter((8, 8))
    generator = np.random.default_rng(0)

    def make_preset(path):
        for weight in backbone.weights:
            weight.assign(generator.normal(size=weight.shape))
        backbone.save_to_preset(path, max_shard_size=60_000)
        # A push would make another card; one that was written by hand it keeps.
        (path / "README.md").write_text(f"# {path.name}\n")
        return path

    return make_preset


def files_in(path):
    return {p.name: p.read_bytes() for p in pathlib.Path(path).iterdir()}


def hashes(files):
    return {n: hashlib.sha256(c).hexdigest() for n, c in files.items()}


def digest_of_files(path):
    """As in the client."""
    digest = hashlib.sha256()
    for name, content in sorted(files_in(path).items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def test_a_save_killed_at_random_moments_leaves_old_or_new(
    client, make_preset, tmp_path
):
    """A reader that opens it meanwhile has one of them, or is told."""
    old = make_preset(tmp_path / "old" / "preset")
    new = make_preset(tmp_path / "new" / "preset")
    code = (
        KILL
        + """
from keras_vit22b.weights.preset_folder import PresetFolder

models = {name: from_preset(path) for name, path in paths.items()}
for model in models.values():
    # The arrays stay on the host: a fork makes no call of the backend.
    digest(model)


def path_of(n):
    return pathlib.Path(scratch) / str(n) / "preset"


def save(n, name="new"):
    models[name].save_to_preset(path_of(n), max_shard_size=60_000)


def read(n):
    sha256 = hashlib.sha256()
    try:
        with PresetFolder(path_of(n)) as folder:
            for name in names:
                with folder.open(name) as file:
                    sha256.update(name.encode() + file.read())
    except ValueError as error:
        return "told" if "Load again" in str(error) else str(error)
    return whole.get(sha256.hexdigest(), "mix")


def beside(n):
    return os.listdir(path_of(n).parent)


whole = {digest_of_files(pathlib.Path(p)): n for n, p in paths.items()}
for n in range(len(moments) + 2):
    shutil.copytree(paths["old"], path_of(n))
rows = kill_at(moments, save, read, beside)
result = rows, [beside(n) for n in range(len(rows))]
"""
    )
    values = {
        "moments": random_moments(1),
        "paths": {"old": old, "new": new},
        "names": sorted(files_in(new)),
        "scratch": tmp_path / "saved",
    }
    rows, left = client(code, values=values).value
    assert_nobody_saw_a_mix(rows, {"old", "new", "told"})
    assert left == [["preset"]] * len(rows)
    # Some were killed before the exchange, and left a folder.
    assert 2 in [len(row["left"]) for row in rows[2:]], rows


@BOTH
def test_a_push_killed_at_random_moments_leaves_old_or_new(
    server, client, make_preset, tmp_path, xet
):
    """Every commit that a reader may pin has all files of one preset."""
    old = files_in(make_preset(tmp_path / "old"))
    folders = []
    for number in range(KILLS + 2):  # Others, so that all must be sent.
        folders.append(make_preset(tmp_path / f"new{number}"))
        server.store.create(f"org/m{number}")
        server.store.commit(f"org/m{number}", old)
    code = (
        KILL
        + """
def push(n):
    push_to_hub(folders[n], f"org/m{n}")

rows = kill_at(moments, push, lambda n: "new")
pulled = [pull(f"hf://org/m{n}") for n in range(len(rows))]
result = rows, [digest_of_files(path) for path in pulled]
"""
    )
    values = {"moments": random_moments(2), "folders": folders}
    rows, pulled = client(code, "hf_write", xet=xet, values=values).value
    assert_nobody_saw_a_mix(rows, {"new"})
    assert pulled == [digest_of_files(folder) for folder in folders]
    for number, folder in enumerate(folders):
        whole = [{}, hashes(old), hashes(files_in(folder))]
        for commit in server.store.repos[f"org/m{number}"]["commits"].values():
            files = {n: entry["sha256"] for n, entry in commit["files"].items()}
            del files[".gitattributes"]
            assert files in whole, number


@BOTH
def test_a_pull_killed_at_random_moments_leaves_old_new_or_nothing(
    server, client, make_preset, tmp_path, xet
):
    """The cache holds the old preset, and its branch has moved on.

    A reader of the cache has one of the two whole, or is told to load online.
    """
    paths = {n: make_preset(tmp_path / n) for n in ("old", "new")}
    # Large files come slowly, so that most moments are in the middle of one.
    server.faults.append(Fault("^/cdn/.*resolve", times=None, kind="slow"))
    code = (
        KILL
        + """
def cache_of(n):
    return pathlib.Path(scratch) / str(n)


def read(n):
    try:
        path = pull("hf://org/m", cache_dir=cache_of(n), local_files_only=True)
    except ValueError as error:
        return "told" if "not in the cache" in str(error) else str(error)
    return whole.get(digest_of_files(path), "mix")


def stage():
    push_to_hub(paths["old"], "org/m")
    pull("hf://org/m", cache_dir=cache_of("old"))
    push_to_hub(paths["new"], "org/m")


whole = {digest_of_files(pathlib.Path(p)): n for n, p in paths.items()}
assert attempt_in_fork(stage, lambda: None)[0] == 0
for n in range(len(moments) + 2):
    shutil.copytree(cache_of("old"), cache_of(n), symlinks=True)
result = kill_at(
    moments, lambda n: pull("hf://org/m", cache_dir=cache_of(n)), read
)
"""
    )
    values = {
        "moments": random_moments(3),
        "paths": paths,
        "scratch": tmp_path / "caches",
    }
    rows = client(code, "hf_write", xet=xet, values=values).value
    assert_nobody_saw_a_mix(rows, {"old", "new", "told"})
    assert bool(server.seen("xet-read-token")) == xet
    if not xet:  # Xet moves bytes past the server, as fast as it can.
        sent = [(r.sent, r.query) for r in server.seen("^/cdn/.*resolve")]
        assert any(0 < n < int(query["size"]) for n, query in sent), sent
