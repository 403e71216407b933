"""Hub repositories on disk: commits, refs, blobs and the Xet store."""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

from hub_server.access import HubError

LFS_SUFFIXES = (".safetensors", ".bin", ".h5", ".keras", ".npz", ".pt", ".pkl")
LFS_SIZE = 10_000_000
FIRST_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs -text\n"}

# Plain HTTP clients get a Xet file too. Its chunks are compressed, so hf_xet
# itself puts it together, in a process of its own.
REBUILD = """
import sys, hf_xet
address, xet_hash, size, path = sys.argv[1:]
with hf_xet.XetSession().new_file_download_group(
    endpoint=address, token="t", token_expiry_unix_secs=2**40
) as group:
    group.start_download_file(hf_xet.XetFileInfo(xet_hash, int(size)), path)
"""


class HubStore:
    """Repositories under one folder; each change is one atomic rename.

    Use it to set a stage without a client: `create`, `commit`, `head`.

    - `repos/org--name.json`: one repository with its refs and commits
    - `blobs/SHA256`: contents, of git files and of LFS files
    - `cas/`, `views/N/`: what hf_xet writes and reads

    Args:
        folder: path. An older store that is there is opened again.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).absolute()
        self.xet = self.folder / "cas" / "xet" / "xorbs"
        for path in ("repos", "blobs", "parts", "views"):
            (self.folder / path).mkdir(parents=True, exist_ok=True)
        for name in ("xorbs", "shards"):
            (self.xet / name).mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        self.repos = {}
        self._xet_hashes = {}
        self._shards_read = set()
        for path in (self.folder / "repos").glob("*.json"):
            repo = json.loads(path.read_text())
            self.repos[repo["id"]] = repo

    # === Repositories ===

    def create(self, repo_id, *, private=False, gated=False, granted=()):
        """Make a repository with the first commit that the Hub makes.

        Args:
            repo_id: str, `"org/name"`.
            private: bool.
            gated: `False`, `"auto"` or `"manual"`.
            granted: users outside the organisation that may read it.
        """
        with self.lock:
            self.repos[repo_id] = {
                "id": repo_id,
                "private": private,
                "gated": gated,
                "granted": list(granted),
                "refs": {"refs/heads/main": None},
                "commits": {},
                "discussions": [],
            }
            return self.commit(repo_id, FIRST_FILES, title="initial commit")

    def delete(self, repo_id):
        with self.lock:
            del self.repos[repo_id]
            self._path(repo_id).unlink()

    def save(self, repo):
        """Put a changed repository on disk, whole."""
        path = self._path(repo["id"])
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(repo))
        os.replace(temporary, path)

    def _path(self, repo_id):
        return self.folder / "repos" / f"{repo_id.replace('/', '--')}.json"

    def ref(self, repo, revision):
        """Full name of a branch, pull request or tag; None if unknown."""
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((name for name in names if name in repo["refs"]), None)

    def resolve(self, repo, revision):
        """Commit, as a dict, of a branch, tag, `refs/...` or full sha."""
        sha = repo["refs"].get(self.ref(repo, revision), revision)
        if sha not in repo["commits"]:
            raise HubError(
                404, f"Invalid rev id: {revision}", "RevisionNotFound"
            )
        return repo["commits"][sha]

    def head(self, repo_id, revision="main"):
        """Sha that a revision is at."""
        return self.resolve(self.repos[repo_id], revision)["sha"]

    def history(self, repo_id, revision="main"):
        """Commits as dicts, from the newest to the first."""
        repo = self.repos[repo_id]
        commit = self.resolve(repo, revision)
        while commit:
            yield commit
            commit = repo["commits"].get(commit["parent"])

    def commit(
        self,
        repo_id,
        changes,
        *,
        revision="main",
        title="commit",
        message="",
        parent=None,
        user="alice",
    ):
        """Commit to a branch, all or nothing.

        Args:
            repo_id: str, `"org/name"`.
            changes: dict from path to bytes, to an entry that `entry` or
                `lfs_entry` made, or to None to delete. Any path is taken, so
                that a hostile repository can be staged.
            parent: str. The commit that the branch must be at.

        Returns:
            The new commit's sha, 40 hexadecimal digits.
        """
        with self.lock:
            repo = self.repos[repo_id]
            ref = self.ref(repo, revision)
            if ref is None or ref.startswith("refs/tags/"):
                raise HubError(
                    404, f"No branch: {revision}", "RevisionNotFound"
                )
            head = repo["refs"][ref]
            if parent is not None and parent != head:
                raise HubError(
                    412, "A commit has happened since. Please refresh."
                )
            files = dict(repo["commits"][head]["files"]) if head else {}
            for path, change in changes.items():
                if change is None:
                    del files[path]
                elif isinstance(change, bytes):
                    lfs = is_lfs(path, change, len(change))
                    files[path] = self.entry(change, lfs)
                else:
                    files[path] = change
            now = datetime.datetime.now(datetime.UTC).isoformat()
            commit = {
                "parent": head,
                "title": title,
                "message": message,
                "date": now.replace("+00:00", "Z"),
                "user": user,
                "files": dict(sorted(files.items())),
            }
            sha = hashlib.sha1(json.dumps(commit).encode()).hexdigest()
            repo["commits"][sha] = commit | {"sha": sha}
            repo["refs"][ref] = sha
            self.save(repo)
            return sha

    # === Contents ===

    def entry(self, content, lfs=False):
        """Store bytes; return the entry of a git file or an LFS file."""
        sha256 = hashlib.sha256(content).hexdigest()
        with self.writing(sha256) as file:
            file.write(content)
        if lfs:
            return self.lfs_entry(sha256, len(content))
        oid = git_oid(content)
        size = len(content)
        return {"size": size, "oid": oid, "sha256": sha256, "lfs": False}

    def lfs_entry(self, sha256, size):
        """Entry of an LFS file whose contents were stored before."""
        if not self.holds(sha256):
            raise HubError(400, f"LFS pointer to a missing object: {sha256}")
        pointer = (
            "version https://git-lfs.github.com/spec/v1\n"
            f"oid sha256:{sha256}\nsize {size}\n"
        )
        oid = git_oid(pointer.encode())
        return {"size": size, "oid": oid, "sha256": sha256, "lfs": True}

    def blob(self, sha256):
        """Path of a blob; there is a file only if it came whole."""
        return self.folder / "blobs" / sha256

    def holds(self, sha256):
        return self.blob(sha256).exists() or self.xet_hash(sha256) is not None

    @contextlib.contextmanager
    def writing(self, sha256):
        """File to write a blob to; kept only if its sha256 is right."""
        file = tempfile.NamedTemporaryFile(dir=self.folder, delete=False)
        try:
            with file:
                yield file
            with open(file.name, "rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            if digest != sha256:
                raise HubError(400, f"Content is {digest}, not {sha256}")
            os.replace(file.name, self.blob(sha256))
        finally:
            pathlib.Path(file.name).unlink(missing_ok=True)

    def spoil(self):
        """Flip a byte in the middle of each blob and each file of chunks."""
        chunks = (self.xet / "xorbs").glob("*[!t]")  # not *.tagset
        for path in [*(self.folder / "blobs").iterdir(), *chunks]:
            content = bytearray(path.read_bytes())
            if content:
                content[len(content) // 2] ^= 0xFF
            path.chmod(0o600)
            path.write_bytes(content)

    def stored_bytes(self):
        """Bytes of contents held: blobs, parts of blobs and Xet chunks."""
        folders = (
            self.folder / "blobs",
            self.folder / "parts",
            self.xet / "xorbs",
        )
        files = [file for folder in folders for file in folder.iterdir()]
        return sum(file.stat().st_size for file in files)

    # === Xet ===

    def xet_address(self, write):
        """A `local://` address for one client.

        It may be open in one process only, since it locks its index. So there
        is one writer at a time, and each reader gets a folder of its own with
        a copy of the index and links to the chunks.
        """
        if write:
            return f"local://{self.folder / 'cas'}"
        with self.lock:
            number = len(os.listdir(self.folder / "views"))
            view = self.folder / "views" / str(number)
            (view / "xet" / "xorbs").mkdir(parents=True)
        for path in self.xet.iterdir():
            copy = view / "xet" / "xorbs" / path.name
            if path.is_dir():
                copy.symlink_to(path)
            else:
                shutil.copy(path, copy)
        return f"local://{view}"

    def xet_hash(self, sha256):
        """Xet hash of contents that came through Xet; None for others."""
        if sha256 not in self._xet_hashes:
            for path in (self.xet / "shards").glob("*.mdb"):
                if path.name not in self._shards_read:
                    self._xet_hashes |= shard_hashes(path.read_bytes())
                    self._shards_read.add(path.name)
        return self._xet_hashes.get(sha256)

    def whole_blob(self, sha256, size):
        """Path of contents as one file, put together from Xet if need be."""
        with self.lock:
            if not self.blob(sha256).exists():
                xet_hash = self.xet_hash(sha256)
                if xet_hash is None:
                    raise HubError(404, "Not Found")
                with self.writing(sha256) as file:
                    values = (xet_hash, str(size), file.name)
                    subprocess.run(
                        (sys.executable, "-c", REBUILD)
                        + (self.xet_address(write=False), *values),
                        env=os.environ
                        | {"HF_XET_CACHE": str(self.folder / "cache")},
                        check=True,
                    )
        return self.blob(sha256)


def is_lfs(path, sample, size):
    """Say as the Hub would whether a file goes to large file storage."""
    if path.endswith(LFS_SUFFIXES) or size > LFS_SIZE or b"\0" in sample:
        return size > 0
    return False


def git_oid(content):
    """Git's own name for a file: sha1 of a header and the content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def shard_hashes(shard):
    """Read from a Xet shard (.mdb) the Xet hash of each file, by sha256.

    After a header of 48 bytes come the files, each as records of 48 bytes:
    one with hash, flags and segment count, the segments, as many checks if
    the top flag is set, and one that starts with the sha256 if the next flag
    is set. A hash of all ones ends the list.
    Reference: https://github.com/huggingface/xet-core (mdb_shard)
    """
    record = 48
    hashes = {}
    at = record
    while shard[at : at + 32] != b"\xff" * 32:
        xet_hash = shard[at : at + 32]
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        at += record * (1 + segments * (2 if flags >> 31 else 1))
        if flags & 1 << 30:
            hashes[hash_text(shard[at : at + 32])] = hash_text(xet_hash)
            at += record
    return hashes


def hash_text(raw):
    """Print 32 bytes as Xet does: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))
