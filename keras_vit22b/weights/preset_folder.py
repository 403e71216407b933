"""A preset's folder: opened once for reading, replaced whole for writing.

A save writes a new folder beside the old one and exchanges the two in one
step, so a kill at any moment leaves the old preset or the new one. A reader
holds the folder open: it sees the one it opened, and an error if that was
replaced before all was read, but never files of both.
"""

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import threading

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

SUFFIX = ".saving"
MOST_FAULTS = 50
# The names that a save makes: an old preset's are not kept.
OWN_NAMES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|"
    r"model\.weights\.json|"
    r"(config|image_converter|metadata|preprocessor|recipe)\.json"
)
# A pipe would keep its reader waiting; it is opened to be refused.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)
CHUNK = 16 * 1024 * 1024
AT_FDCWD = -100
EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS.
_SAVING = threading.RLock()


class PresetFolder:
    """A folder, held open, whose files are read by plain names.

    Args:
        path: path of the folder.
        blobs: paths of folders that links may lead into, as those of a
            snapshot of the Hub's cache do. Defaults to none: links may not
            leave the folder.
        source: string. Where it is from, to be written beside a result.
            Defaults to `None`: its path.

    Raises:
        ValueError: if there is no such folder.
    """

    def __init__(self, path, *, blobs=(), source=None):
        self.path = pathlib.Path(path)
        self.source = source or str(path)
        self._roots = [os.path.realpath(p) for p in (path, *blobs)]
        if not self.path.is_dir():
            raise ValueError(f"There is no folder {str(path)!r}.")
        # Windows cannot open a folder; there its path must serve.
        self._fd = None
        if os.open in os.supports_dir_fd:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._fd is not None:
            os.close(self._fd)

    def has(self, name):
        """Return whether the folder has a file of this name."""
        try:
            with self.open(name):
                return True
        except FileNotFoundError:
            return False

    def open(self, name):
        """Open a file for reading bytes.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the name is no plain file name, or that of
                something else than a file, or of a link that leads out of the
                folder; or if the folder was replaced meanwhile.
        """
        if (
            pathlib.PurePath(name).name != name
            or name in ("", "..")
            or "\\" in name
            or ":" in name
        ):
            raise ValueError(f"{name!r} is not the plain name of a file.")
        path = self.path / name
        try:
            fd = os.open(
                path if self._fd is None else name,
                os.O_RDONLY | NO_WAIT | BINARY,
                dir_fd=self._fd,
            )
        except FileNotFoundError:
            if self._was_replaced():
                raise ValueError(
                    f"{self.path} was replaced while it was read. Load again."
                ) from None
            raise
        except OSError as error:
            raise ValueError(f"Cannot open {path}: {error}.") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError(f"{path} is not a file.")
        file = open(fd, "rb", buffering=0)
        if os.path.islink(path):
            target = pathlib.Path(os.path.realpath(path))
            if not any(map(target.is_relative_to, self._roots)):
                file.close()
                raise ValueError(
                    f"{path} is a link that leads out of its folder."
                )
        return file

    def open_header(self, name):
        """Open a safetensors file for a look at its header.

        Returns:
            A binary file object, and the bytes of the whole file if the object
            holds only part of it, or else `None`.
        """
        return self.open(name), None

    def _was_replaced(self):
        """Return whether the path is by now that of another folder."""
        if self._fd is None:
            return False
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(status, os.fstat(self._fd))

    def read_json(self, name, *, limit=100_000_000):
        """Read a JSON object, with a clear error.

        Raises:
            ValueError: if the file is missing, too large or no JSON object.
        """
        path = self.path / name
        try:
            with self.open(name) as file:
                size = os.fstat(file.fileno()).st_size
                if size > limit:
                    raise ValueError(f"{size:,} bytes exceed {limit:,}")
                value = json.loads(file.read())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"Cannot read {path}: {error}.") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} must hold a JSON object.")
        return value


def hash_file(file, digest=None):
    """Return an open file's hash, in hexadecimal.

    Args:
        file: binary file object.
        digest: a `hashlib` object. Defaults to `None`: sha256.
    """
    digest = digest or hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def listed(faults):
    """Return faults as lines, or the first of very many."""
    lines = faults[:MOST_FAULTS]
    if len(faults) > MOST_FAULTS:
        lines = [*lines, f"and {len(faults) - MOST_FAULTS:,} more"]
    return "".join(f"\n  {line}" for line in lines)


@contextlib.contextmanager
def replacing_file(path):
    """Yield a temporary path that becomes `path` if the body succeeds."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{owner}{SUFFIX}")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def staging_path(path, owner=None):
    """Return where a save makes the new folder: beside the old one.

    Args:
        path: path of the folder.
        owner: string. Who saves. Defaults to `None`: this process.
    """
    path = pathlib.Path(os.path.realpath(path))
    owner = owner or f"{socket.gethostname()}-{os.getpid()}"
    return path.with_name(f".{path.name}.{owner}{SUFFIX}")


@contextlib.contextmanager
def replacing_folder(path, owner=None):
    """Yield a new folder that becomes `path` if the body succeeds.

    Files of the old folder that no save makes, such as notes, are kept. The
    threads of a process take turns.

    Args:
        path: path of the folder.
        owner: string. Who saves. Defaults to `None`: this process.
    """
    with _SAVING, _replacing(path, owner) as folder:
        yield folder


@contextlib.contextmanager
def _replacing(path, owner):
    staging = staging_path(path, owner)
    path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_replaceable(path)
    _remove_leftovers(path)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    if path.exists():
        staging.chmod(path.stat().st_mode & 0o7777)
    try:
        yield staging
        if path.exists():
            _keep_foreign(path, staging)
        for file in staging.iterdir():
            _sync(file)
        _sync(staging)
        _swap(staging, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_replaceable(path):
    """Raise unless a folder may be exchanged for a new one."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder.")
    if os.path.ismount(path):
        raise _mount_error(path)
    if pathlib.Path.cwd().is_relative_to(path):
        raise ValueError(
            f"{path} is the working directory, or holds it. A save replaces "
            "its folder as a whole; name one below it."
        )
    folders = sorted(file.name for file in path.iterdir() if file.is_dir())
    if folders:
        raise ValueError(
            f"{path} holds other folders ({', '.join(folders[:3])}). A save "
            "replaces its folder as a whole; name one of its own."
        )


def _mount_error(path):
    return ValueError(
        f"{path} is a mount point, or in use as one. A save replaces its "
        "folder as a whole; name one below it."
    )


def _remove_leftovers(path):
    """Remove what saves of this machine left when they were killed."""
    prefix = f".{path.name}.{socket.gethostname()}-"
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*{SUFFIX}"):
        pid = folder.name.removeprefix(prefix).removesuffix(SUFFIX)
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return pid != os.getpid()


def _keep_foreign(old, new):
    for file in old.iterdir():
        target = new / file.name
        if target.exists() or OWN_NAMES.fullmatch(file.name):
            continue
        try:
            os.link(file, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(file, target, follow_symlinks=False)


def _sync(path):
    """Wait until a file or folder is on disk."""
    if path.is_symlink() or sys.platform == "win32":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _swap(new, old):
    """Put `new` in the place of `old` in one step."""
    if not old.exists():
        os.rename(new, old)
        return
    try:
        _exchange(new, old)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EBUSY):
            # A mount of the same file system does not look like one before.
            raise _mount_error(old) from None
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise
        # Two steps, where the system has no exchange.
        aside = new.with_name(new.name + ".old")
        os.rename(old, aside)
        os.rename(new, old)
        os.rename(aside, new)


def _exchange(new, old):
    library = ctypes.CDLL(None, use_errno=True)
    paths = [os.fsencode(p) for p in (new, old)]
    if sys.platform == "linux":
        failed = library.renameat2(
            AT_FDCWD, paths[0], AT_FDCWD, paths[1], EXCHANGE
        )
    elif sys.platform == "darwin":
        failed = library.renamex_np(paths[0], paths[1], EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, "no exchange of folders")
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old))


@contextlib.contextmanager
def only_writer(folder):
    """Keep another process from writing to a folder, where the system can.

    Raises:
        ValueError: if one does.
    """
    if fcntl is None:
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another run is writing into {folder}. Wait for its end, or "
                "take another folder."
            ) from None
        yield
