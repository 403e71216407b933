"""From a request to an answer: the table of routes and the answer itself.

A route takes the server, the request and the named parts of its path. What
it returns is sent as JSON, unless it is an `Answer`. It raises `HubError`.
"""

import dataclasses
import io
import json
import pathlib
import re
import urllib.parse

from hub_server.access import HubError
from hub_server.access import permit

PIECE = 1 << 20
ROUTES = []
PARTS = {"repo": "[^/]+/[^/]+?", "path": ".+"}


def route(method, template, needs=None):
    """Register a function for `/a/{part}/b`; `{repo}` is two path segments.

    Args:
        needs: what the token must allow, see `permit`. The function then gets
            the repository as a dict.
    """
    pattern = re.sub(
        r"{(\w+)}",
        lambda name: f"(?P<{name[1]}>{PARTS.get(name[1], '[^/]+')})",
        template.replace(".", r"\."),
    )

    def register(function):
        ROUTES.append((method, re.compile(pattern), needs, function))
        return function

    return register


def answer(hub, request):
    """Find the route of a request, check its token, and run it."""
    path = urllib.parse.urlsplit(request.path).path
    method = "GET" if request.method == "HEAD" else request.method
    for wanted, pattern, needs, function in ROUTES:
        match = pattern.fullmatch(path)
        if not match or wanted != method:
            continue
        parts = {
            name: urllib.parse.unquote(part)
            for name, part in match.groupdict().items()
        }
        if needs:
            parts["repo"] = hub.store.repos.get(parts["repo"])
            permit(hub, request, parts["repo"], needs)
        value = function(hub, request, **parts)
        return value if isinstance(value, Answer) else Answer.of_json(value)
    raise HubError(404, f"No such endpoint: {method} {path}")


@dataclasses.dataclass
class Answer:
    """Status, headers, and bytes `start` to `stop` of bytes or of a file."""

    status: int = 200
    content: bytes | pathlib.Path = b""
    headers: dict = dataclasses.field(default_factory=dict)
    start: int = 0
    stop: int | None = None

    def __post_init__(self):
        if self.stop is None:
            self.stop = self.length()

    @classmethod
    def of_json(cls, value, status=200, **headers):
        headers["Content-Type"] = "application/json"
        return cls(status, json.dumps(value).encode(), headers)

    @classmethod
    def of_error(cls, error):
        return cls.of_json({"error": str(error)}, error.status, **error.headers)

    def length(self):
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size

    def limit(self, request):
        """Keep the one range, `bytes=a-b` or `bytes=a-`, that is asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "")
        if not match:
            return self
        length = self.length()
        start = int(match[1])
        stop = min(int(match[2] or length) + 1, length)
        if start >= stop:
            headers = {"Content-Range": f"bytes */{length}"}
            raise HubError(416, "Range Not Satisfiable", **headers)
        self.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{length}"
        return dataclasses.replace(self, status=206, start=start, stop=stop)

    def pieces(self, size, step=PIECE):
        """The next `size` bytes to send, `step` at a time."""
        if isinstance(self.content, bytes):
            file = io.BytesIO(self.content)
        else:
            file = open(self.content, "rb")
        with file:
            file.seek(self.start)
            while size and (piece := file.read(min(size, step))):
                size -= len(piece)
                yield piece
