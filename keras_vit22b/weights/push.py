"""Presets to the Hugging Face Hub."""

import pathlib
import re
import tempfile

from keras_vit22b.weights import preset_config
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.card import keeps_card
from keras_vit22b.weights.card import make_card
from keras_vit22b.weights.hub import REPOSITORY
from keras_vit22b.weights.hub import SCHEME
from keras_vit22b.weights.hub import HubPreset
from keras_vit22b.weights.hub import check_token
from keras_vit22b.weights.hub import hash_of
from keras_vit22b.weights.hub import in_time
from keras_vit22b.weights.hub import is_passing
from keras_vit22b.weights.preset_config import CARD_FILE
from keras_vit22b.weights.preset_config import METADATA_FILE
from keras_vit22b.weights.preset_folder import OWN_NAMES
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.verification import verify_folder

MESSAGE = "Upload a preset with keras_vit22b"


def push_to_hub(
    model_or_folder,
    repository,
    *,
    private=None,
    revision=None,
    message=None,
    token=None,
    create_pr=False,
    card=None,
):
    """Upload a model or preset folder to the Hugging Face Hub.

    The repository is made if needed. All files come in one commit, so no
    reader sees a mix. Pushing again after an interruption sends only what is
    missing; pushing what is there makes no commit. The card is written anew,
    with the repository's name, unless the folder's was edited.

    Args:
        model_or_folder: a model with `save_to_preset`, or the path of a
            folder that it wrote.
        repository: string. `org/name`.
        private: bool. For a new repository. Defaults to `None`: the
            organization's default.
        revision: string. A branch to push to. Defaults to `None`: main.
        message: string. Of the commit. Defaults to `None`.
        token: string. Defaults to `None`: the one that is logged in.
        create_pr: bool. Whether to open a pull request instead. Defaults to
            `False`.
        card: dict. As in `save_to_preset`; what it lacks is as the folder
            states it. Defaults to `None`.

    Returns:
        string. `hf://org/name@commit`, which `from_preset` loads.

    Raises:
        ValueError: if the folder is no preset, or the Hub refuses.
    """
    if not re.fullmatch(REPOSITORY, str(repository)):
        raise ValueError(
            f"repository must be like 'org/name'. Received: {repository!r}."
        )
    options = {
        "private": private,
        "revision": revision,
        "message": message or MESSAGE,
        "create_pr": create_pr,
    }
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        if hasattr(model_or_folder, "save_to_preset"):
            folder = scratch / "preset"
            model_or_folder.save_to_preset(folder, card=card)
        else:
            folder = pathlib.Path(model_or_folder)
        verify_folder(folder)
        files = _files(folder) | _card_files(
            folder,
            scratch,
            card,
            title=repository.split("/")[-1],
            handle=f"{SCHEME}{repository}" + f"@{revision}" * bool(revision),
        )
        commit = _Repository(repository, token).push(files, **options)
    return f"{SCHEME}{repository}@{commit}"


def _files(folder):
    """Return `{name: path}` of the files that make a preset."""
    with PresetFolder(folder) as opened:
        names = set(preset_files.open_weights(opened).files.values())
    names |= {
        path.name
        for path in folder.glob("*.json")
        if OWN_NAMES.fullmatch(path.name)
    }
    return {name: folder / name for name in sorted(names)}


def _card_files(folder, scratch, card, *, title, handle):
    """Return `{name: path}` of the card, and of metadata that it changes."""
    if keeps_card(folder, card):
        return {CARD_FILE: folder / CARD_FILE}
    with PresetFolder(folder) as opened:
        metadata = preset_config.read_metadata(opened)
        stated = metadata.get("card", {}) | (card or {})
        preset_config.check_card("card", stated)
        text = make_card(opened, stated, title=title, handle=handle)
    files = {CARD_FILE: scratch / CARD_FILE}
    files[CARD_FILE].write_text(text, encoding="utf-8")
    if card:
        files[METADATA_FILE] = scratch / METADATA_FILE
        metadata["card"] = stated
        preset_config.write_json(files[METADATA_FILE], metadata)
    return files


class _Repository(HubPreset):
    """A repository to write to, with the retries and errors of a load."""

    def __init__(self, repository, token):
        from huggingface_hub import HfApi

        self.repository = repository
        self._api = HfApi(library_name="keras_vit22b", token=check_token(token))

    def push(self, files, *, private, **options):
        """Make the repository hold these files, in at most one commit.

        Args:
            files: dict from name to path.
            private: bool or `None`. As in `push_to_hub`, like the others.

        Returns:
            string. The commit that holds them.
        """
        try:
            self._call(
                "create",
                lambda: in_time(
                    self._api.create_repo,
                    self.repository,
                    private=private,
                    exist_ok=True,
                ),
            )
            additions = self._additions(files)
            return self._call(
                "push to", lambda: self._commit(additions, **options)
            )
        except ValueError as error:
            raise ValueError(
                f"{str(error).rstrip('.')}. Pushing needs a token that may "
                "write there; pushing again sends only what is missing."
            ) from None

    def _additions(self, files):
        from huggingface_hub import CommitOperationAdd

        # Once for all attempts: they note what was uploaded.
        return {
            name: CommitOperationAdd(name, str(path))
            for name, path in files.items()
        }

    def _commit(self, additions, *, revision, message, create_pr):
        """Commit what the branch lacks; return the commit that has all.

        An attempt whose answer was lost may have succeeded, so each begins
        with a look at the branch.
        """
        from huggingface_hub import CommitOperationDelete

        head = in_time(
            self._api.repo_info, self.repository, revision=revision
        ).sha
        there = self._tree(head)
        operations = [
            addition
            for name, addition in additions.items()
            if not _is_same(addition, there.get(name))
        ]
        try:
            self._api.preupload_lfs_files(
                self.repository,
                operations,
                revision=revision,
                create_pr=create_pr,
                free_memory=False,
            )
        except RuntimeError as error:
            # In LFS the client wraps what went wrong with a file.
            raise error.__cause__ or error from None
        # An index of other weights, say, would be read before these.
        operations += [
            CommitOperationDelete(name)
            for name in there
            if OWN_NAMES.fullmatch(name) and name not in additions
        ]
        if not operations:
            return head
        try:
            commit = in_time(
                self._api.create_commit,
                self.repository,
                operations,
                commit_message=message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=head,
            )
        except Exception as error:
            if create_pr and is_passing(error):
                # Each attempt would open one more.
                raise ValueError(
                    f"The answer of {self} was lost ({type(error).__name__}): "
                    "see there whether the pull request is open"
                ) from None
            raise
        return commit.oid

    def _tree(self, commit):
        """Return `{name: entry}` of the files at a commit."""
        entries = in_time(
            lambda: list(
                self._api.list_repo_tree(self.repository, revision=commit)
            )
        )
        return {e.path: e for e in entries if hasattr(e, "size")}


def _is_same(addition, entry):
    """Return whether a repository's entry has the content of an addition."""
    if entry is None or entry.size != addition.upload_info.size:
        return False
    if entry.lfs:
        return entry.lfs.sha256 == addition.upload_info.sha256.hex()
    path = pathlib.Path(addition.path_or_fileobj)
    return entry.blob_id == hash_of(path, sha256=False)
