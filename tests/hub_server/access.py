"""Who may do what on the test Hub, and the Hub's own refusals."""

import dataclasses
import re


class HubError(Exception):
    """An error to answer with: HTTP status, message and Hub error code."""

    def __init__(self, status, message, code=None, **headers):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **headers}
        if code:
            self.headers["X-Error-Code"] = code


@dataclasses.dataclass(frozen=True)
class Token:
    """What a token may do.

    Attributes:
        user: str.
        role: `"write"`, `"read"` or `"fineGrained"`.
        namespaces: names whose repositories it may see and, unless its role
            is `"read"`, change.
        gated: bool. Whether it may read gated repositories of others.
    """

    user: str
    role: str
    namespaces: tuple
    gated: bool = True


TOKENS = {
    "hf_write": Token("alice", "write", ("alice", "org")),
    "hf_read": Token("alice", "read", ("alice", "org")),
    "hf_fine": Token("alice", "fineGrained", ("org",), gated=False),
    "hf_other": Token("bob", "write", ("bob",)),
}
LOG_IN = "Invalid username or password."


def caller(hub, request):
    """Token of a request; None without one, an error for an unknown one."""
    if request.token is not None and request.token not in hub.tokens:
        raise HubError(401, "Invalid credentials in Authorization header")
    return hub.tokens.get(request.token)


def signed_in(hub, request):
    """Token of a request that needs one."""
    token = caller(hub, request)
    if token is None:
        raise HubError(401, LOG_IN)
    return token


def permit(hub, request, repo, needs):
    """Raise the Hub's own error unless the token allows what is needed.

    Args:
        repo: dict, or None if there is none of that name.
        needs: `"read"` for names and sizes, `"content"` for files, `"write"`.
    """
    token = caller(hub, request)
    member = bool(token and repo) and namespace(repo) in token.namespaces
    hidden = repo is None or repo["private"] and not member
    if token is None and (hidden or needs == "write"):
        raise HubError(401, LOG_IN, "RepoNotFound")
    if hidden:
        raise HubError(404, "Repository not found", "RepoNotFound")
    if needs == "write":
        member = member or for_pull_request(request)
        if token.role == "read" or not member:
            raise HubError(
                403, "you must use a write token to upload to a repository."
            )
    if needs == "content" and repo["gated"] and not member:
        pass_gate(hub, repo, token)


def for_pull_request(request):
    """Whether anyone may write this; an LFS request does not say for what."""
    return request.query.get("create_pr") == "1" or bool(
        re.search(r"/refs%2Fpr%2F|\.git/info/lfs/", request.path)
    )


def pass_gate(hub, repo, token):
    """Raise unless a gated repository's files are open to the token."""
    start = f"Access to model {repo['id']} is restricted"
    if token is None:
        raise HubError(401, f"{start}. Please log in.", "GatedRepo")
    if token.user not in repo["granted"]:
        raise HubError(
            403,
            f"{start} and you are not in the authorized list. Visit "
            f"{hub.url}/{repo['id']} to ask for access.",
            "GatedRepo",
        )
    if not token.gated:  # The Hub sends no error code with this one.
        raise HubError(
            403,
            "Please enable access to public gated repositories in your "
            "fine-grained token settings to view this repository.",
        )


def owner(hub, request, name=None):
    """Namespace in which the token may make and delete repositories."""
    token = signed_in(hub, request)
    name = name or token.user
    if token.role == "read" or name not in token.namespaces:
        raise HubError(
            403,
            "You don't have the rights to create a model under the namespace "
            f'"{name}"',
        )
    return name


def namespace(repo):
    return repo["id"].split("/")[0]
