"""Presets to the Hugging Face Hub."""

import pathlib
import tempfile

from keras_vit22b.weights.hub import FILE_NAME
from keras_vit22b.weights.hub import SCHEME
from keras_vit22b.weights.verification import verify_folder

# What an earlier push may have left, which would not fit this preset's files.
OWN_PATTERNS = [
    "image_converter.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "preprocessor.json",
]


def push_to_hub(
    model_or_folder,
    repository,
    *,
    private=None,
    revision=None,
    message=None,
    token=None,
    create_pr=False,
):
    """Upload a model or preset folder to the Hugging Face Hub.

    The repository is made if needed. Pushing again after an interruption
    sends only what is missing; pushing what is there makes no commit.

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

    Returns:
        string. `hf://org/name@commit`, which `from_preset` loads.

    Raises:
        ValueError: if the folder is no preset, or the Hub refuses.
    """
    options = {
        "private": private,
        "revision": revision,
        "commit_message": message,
        "token": token,
        "create_pr": create_pr,
    }
    if not hasattr(model_or_folder, "save_to_preset"):
        return _push(pathlib.Path(model_or_folder), repository, **options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "preset"
        model_or_folder.save_to_preset(folder)
        return _push(folder, repository, **options)


def _push(folder, repository, *, private, token, **options):
    from huggingface_hub import HfApi
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    verify_folder(folder)
    names = [p.name for p in folder.iterdir() if FILE_NAME.fullmatch(p.name)]
    api = HfApi(library_name="keras_vit22b", token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=names,
            delete_patterns=OWN_PATTERNS,
            **{k: v for k, v in options.items() if v is not None},
        )
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise ValueError(
            f"The Hub refused {repository}: {type(error).__name__}"
            + (f", status {status}" if status else "")
            + ". Pushing needs a token that may write there."
        ) from None
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        # RuntimeError is of hf_xet.
        raise ValueError(
            f"Cannot push to {repository}: {type(error).__name__}. Push again: "
            "only what is missing is sent."
        ) from None
    return f"{SCHEME}{repository}@{commit.oid}"
