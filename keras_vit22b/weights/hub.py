"""Presets from the Hugging Face Hub.

A branch is resolved to a commit once, and every file comes from that commit.
Each file's hash is checked against what the Hub says of it: the client itself
compares only sizes.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import json
import logging
import pathlib
import re
import threading
import time

from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.preset_folder import hash_file
from keras_vit22b.weights.preset_folder import replacing_file
from keras_vit22b.weights.safetensors_file import MAX_HEADER_BYTES
from keras_vit22b.weights.shards import WEIGHTS_FILE
from keras_vit22b.weights.shards import read_index

logger = logging.getLogger(__name__)

SCHEME = "hf://"
REPOSITORY = r"[\w.-]+/[\w.-]+"
HANDLE = re.compile(rf"hf://({REPOSITORY})(?:@(.+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
# What a preset may hold, and the bytes of one file that is not of weights.
FILE_NAME = re.compile(
    r"[A-Za-z0-9._-]+\.safetensors|model\.safetensors\.index\.json|"
    r"model\.weights\.json|(config|image_converter|metadata|preprocessor|"
    r"recipe)\.json|README\.md"
)
LARGEST_TEXT = 100_000_000
ATTEMPTS = 5
LONGEST_WAIT = 8.0
# Seconds for an answer, the client's own attempts included.
TIMEOUT = 60.0
# Bytes to ask for before the length of a header is known.
USUAL_HEADER = 64 * 1024


def is_hub_handle(handle):
    """Return whether a handle names a repository of the Hub."""
    return str(handle).startswith(SCHEME)


def parse_handle(handle, revision=None):
    """Return `(repository, revision or None)` of `hf://org/name[@revision]`.

    Raises:
        ValueError: if the handle has another form, or names another revision
            than `revision`.
    """
    match = HANDLE.fullmatch(str(handle))
    if match is None:
        raise ValueError(
            f"{str(handle)!r} is not of the form hf://org/name or "
            "hf://org/name@revision."
        )
    repository, named = match.groups()
    if None not in (named, revision) and named != revision:
        raise ValueError(
            f"{str(handle)!r} names revision {named!r}, but revision="
            f"{revision!r} was passed."
        )
    return repository, named or revision


class HubPreset:
    """A preset of the Hub at one commit, its files in the local cache.

    Args:
        handle: string. `hf://org/name[@revision]`.
        revision: string. A branch, tag or commit. Defaults to `None`: the
            main branch.
        token: string, or `False` for none. Defaults to `None`: the one that
            is logged in.
        cache_dir: path. Defaults to `None`: the Hub client's cache.
        local_files_only: bool. Whether to use the cache alone. Defaults to
            `False`.

    Attributes:
        repository: string. `org/name`.
        commit: string. 40 hexadecimal digits.

    Raises:
        ValueError: if the repository or revision does not exist, may not be
            read, cannot be reached, or is not in the cache.
    """

    def __init__(
        self,
        handle,
        *,
        revision=None,
        token=None,
        cache_dir=None,
        local_files_only=False,
    ):
        from huggingface_hub import HfApi
        from huggingface_hub import constants

        self.repository, revision = parse_handle(handle, revision)
        self._token = token = check_token(token)
        self._local = local_files_only or constants.is_offline_mode()
        self._cache = pathlib.Path(cache_dir or constants.HF_HUB_CACHE)
        self._api = HfApi(library_name="keras_vit22b", token=token)
        self.commit = self._resolve(revision)
        # `{file name: (sha256 or git's sha1, size)}`
        self._hashes = self._list_files()
        if "config.json" not in self._hashes:
            raise ValueError(f"{self} has no config.json, so it is no preset.")

    def __str__(self):
        return f"{SCHEME}{self.repository}@{getattr(self, 'commit', '')}"

    @property
    def source(self):
        """string. The handle with its commit: what to write beside a score."""
        return str(self)

    @property
    def names(self):
        """Names of the files that a preset may have."""
        return list(self._hashes)

    def has_fetched(self, name):
        """Return whether a file is in the cache."""
        return (self.snapshot / name).exists()

    def fetch(self, names):
        """Bring files into the cache, checked.

        Args:
            names: list of string.
        """
        for name in names:
            if name not in self._hashes:
                raise ValueError(f"{self} has no file {name!r}.")
            path = self._download(name)
            self._verify(name, path)

    def read_header(self, name):
        """Return the header of a safetensors file, and the file's bytes.

        Nothing else of the file is fetched; its hash is not checked.
        """
        if name not in self._hashes:
            raise FileNotFoundError(name)
        size = self._hashes[name][1]
        head = self._read_start(name, min(size, USUAL_HEADER))
        length = 8 + int.from_bytes(head[:8], "little")
        if len(head) < length <= min(size, MAX_HEADER_BYTES):
            head = self._read_start(name, length)
        return head, size

    def _read_start(self, name, count):
        """Return the first bytes of a file."""
        from huggingface_hub import constants
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers
        from huggingface_hub.utils import get_session
        from huggingface_hub.utils import hf_raise_for_status

        headers = build_hf_headers(
            token=self._token, library_name="keras_vit22b"
        )
        headers |= {"Range": f"bytes=0-{count - 1}"}
        headers |= {"Accept-Encoding": "identity"}

        def request():
            with get_session().stream(
                "GET",
                hf_hub_url(self.repository, name, revision=self.commit),
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=True,
            ) as response:
                hf_raise_for_status(response)
                start = b""
                # The whole file comes where ranges are not understood.
                for chunk in response.iter_raw():
                    start += chunk
                    if len(start) >= count:
                        break
                return start[:count]

        return self._call(f"read the header of {name} of", request)

    @property
    def snapshot(self):
        """Path of the folder that `fetch` fills."""
        return self._folder / "snapshots" / self.commit

    @property
    def blobs(self):
        """Paths of the folders that links of `snapshot` lead to."""
        # What comes through Xet is shared by all repositories of the cache.
        return self._folder / "blobs", self._cache / "blobs"

    @property
    def _folder(self):
        return self._cache / f"models--{self.repository.replace('/', '--')}"

    @property
    def _record(self):
        return self._folder / "keras_vit22b" / f"{self.commit}.json"

    def _resolve(self, revision):
        if revision is not None and COMMIT.fullmatch(revision):
            return revision
        resolved = self._call(
            "resolve",
            lambda: in_time(
                self._api.resolve_revision,
                self.repository,
                revision=revision,
                cache_dir=self._cache,
                local_files_only=self._local,
                token=self._token,
            ),
        )
        return resolved.resolved

    def _list_files(self):
        """Return names and hashes; from a record of an earlier load if any."""
        if self._record.is_file():
            with contextlib.suppress(ValueError):
                hashes = json.loads(self._record.read_text())
                if _is_record(hashes):
                    return hashes
        if self._local:
            raise ValueError(
                f"{self} is not in the cache {self._cache}, and only local "
                "files may be used. Load it once online."
            )
        entries = self._call(
            "list",
            lambda: in_time(
                lambda: list(
                    self._api.list_repo_tree(
                        self.repository, revision=self.commit, token=self._token
                    )
                )
            ),
        )
        hashes = {}
        for entry in entries:
            if FILE_NAME.fullmatch(entry.path) and hasattr(entry, "size"):
                if (
                    not entry.path.endswith(".safetensors")
                    and entry.size > LARGEST_TEXT
                ):
                    raise ValueError(
                        f"{entry.path} of {self} has {entry.size:,} bytes; "
                        f"the limit is {LARGEST_TEXT:,}."
                    )
                digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
                hashes[entry.path] = [digest, entry.size]
        with replacing_file(self._record) as temporary:
            temporary.write_text(json.dumps(hashes))
        return hashes

    def _download(self, name):
        from huggingface_hub import hf_hub_download

        return pathlib.Path(
            self._call(
                f"download {name} of",
                lambda: hf_hub_download(
                    self.repository,
                    name,
                    revision=self.commit,
                    cache_dir=self._cache,
                    local_files_only=self._local,
                    token=self._token,
                    library_name="keras_vit22b",
                ),
            )
        )

    def _verify(self, name, path):
        """Check a file's hash, once for each state of the file."""
        expected, size = self._hashes[name]
        status = path.stat()
        mark = self._folder / "keras_vit22b" / "verified" / expected
        state = f"{status.st_size} {status.st_mtime_ns}"
        if mark.is_file() and mark.read_text() == state:
            return
        found = hash_of(path, sha256=len(expected) == 64)
        if status.st_size != size or found != expected:
            _remove_with_target(path)
            raise ValueError(
                f"{name} of {self} is damaged: its hash is {found}, the Hub "
                f"says {expected}. It was removed from the cache; load again."
            )
        with replacing_file(mark) as temporary:
            temporary.write_text(state)

    def _call(self, action, request):
        """Make a request, with bounded retries and plain errors."""
        from huggingface_hub import errors
        from huggingface_hub.utils import httpx

        for attempt in range(ATTEMPTS):
            try:
                return request()
            except errors.GatedRepoError:
                problem = (
                    "it is gated. Accept its terms on the Hub, and use a token "
                    "that may read gated repositories"
                )
            except errors.RepositoryNotFoundError:
                problem = (
                    "it does not exist, or it is private and the token may "
                    "not read it"
                )
            except errors.RevisionNotFoundError:
                problem = "it has no such revision"
            except errors.RemoteEntryNotFoundError:
                problem = "it has no such file"
            except (
                errors.LocalEntryNotFoundError,
                errors.OfflineModeIsEnabled,
                errors.RevisionResolutionError,
            ) as error:
                if not is_passing(error.__cause__):
                    problem = (
                        "it is not in the cache and the Hub was not reached "
                        f"({type(error).__name__})"
                    )
                elif attempt + 1 < ATTEMPTS:
                    self._wait(action, attempt, error)
                    continue
                else:
                    problem = f"{ATTEMPTS} attempts failed"
            except (
                errors.HfHubHTTPError,
                httpx.HTTPError,
                OSError,
                RuntimeError,  # Of hf_xet.
            ) as error:
                if is_passing(error) and attempt + 1 < ATTEMPTS:
                    self._wait(action, attempt, error)
                    continue
                problem = f"{type(error).__name__} on attempt {attempt + 1}"
                response = getattr(error, "response", None)
                if response is not None:
                    problem += f", status {response.status_code}"
                    if response.status_code == 401:
                        problem += ": the token is not valid"
            raise ValueError(
                f"Cannot {action} {SCHEME}{self.repository}: {problem}."
            ) from None
        raise AssertionError("unreachable")

    def _wait(self, action, attempt, error):
        seconds = min(2.0**attempt, LONGEST_WAIT)
        logger.warning(
            "Cannot %s %s (%s); again in %g s.",
            action,
            self.repository,
            type(error).__name__,
            seconds,
        )
        time.sleep(seconds)


def _is_record(hashes):
    """Return whether this is what `_list_files` writes."""
    return (
        isinstance(hashes, dict)
        and bool(hashes)
        and all(
            isinstance(entry, list)
            and [type(part) for part in entry] == [str, int]
            for entry in hashes.values()
        )
    )


def check_token(token):
    """Return a token without the line's end that a file may have given it."""
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(
            "token is not one of the Hub's, which are like hf_ and letters. It "
            "is not shown here."
        )
    return token


def in_time(request, *args, **options):
    """Make a request to which the client itself sets no timeout.

    Raises:
        TimeoutError: if there is no answer; the request is left to itself.
    """
    answer = concurrent.futures.Future()

    def run():
        try:
            answer.set_result(request(*args, **options))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(TIMEOUT)


def is_passing(error):
    """Return whether an error may go away: 5xx, 429, timeouts, resets."""
    from huggingface_hub.utils import httpx

    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in (408, 429, 500, 502, 503, 504)
    return isinstance(error, (httpx.TransportError, TimeoutError))


def _remove_with_target(path):
    """Remove a file, and each link on the way to it."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def hash_of(path, *, sha256):
    """Return a file's sha256, or git's sha1 of it as a blob."""
    if sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hash_file(file, digest)


class HubFolder(PresetFolder):
    """The folder of a preset of the Hub, whose files come when asked for.

    Args:
        preset: a `HubPreset`.
    """

    def __init__(self, preset):
        self._preset = preset
        preset.fetch([n for n in preset.names if not _is_weights(n)])
        super().__init__(
            preset.snapshot, blobs=preset.blobs, source=preset.source
        )

    def has(self, name):
        return name in self._preset.names

    def open(self, name):
        if not self.has(name):
            raise FileNotFoundError(name)
        self._preset.fetch([name])
        return super().open(name)

    def open_header(self, name):
        if self._preset.has_fetched(name):
            return super().open_header(name)
        header, size = self._preset.read_header(name)
        return io.BytesIO(header), size

    def fetch_all(self):
        """Bring the files of weights into the cache too, checked."""
        index = read_index(self)
        if index is not None:
            self._preset.fetch(sorted(set(index.weight_map.values())))
        elif self.has(WEIGHTS_FILE):
            self._preset.fetch([WEIGHTS_FILE])


def _is_weights(name):
    return name.endswith(".safetensors")


def open_hub_preset(handle, **options):
    """Return an open `HubFolder`.

    Args:
        handle: string. `hf://org/name[@revision]`.
        **options: of `HubPreset`.
    """
    return HubFolder(HubPreset(handle, **options))
