"""The server itself: it logs each request, lets a fault at it, and answers."""

import dataclasses
import json
import os
import re
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import urllib.parse
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer

import hub_server.downloads
import hub_server.uploads  # noqa: F401 (both fill the table of routes)
from hub_server.access import TOKENS
from hub_server.access import HubError
from hub_server.routes import PIECE
from hub_server.routes import Answer
from hub_server.routes import answer
from hub_server.store import HubStore

SLOW_PIECES, SLOW_SECONDS = 20, 0.5


@dataclasses.dataclass
class Fault:
    """One thing to go wrong, on the requests that it names.

    A large file's bytes come from `/cdn/org/name/resolve/SHA256/PATH`, a small
    one's from `/org/name/resolve/REVISION/PATH`, and each large file is first
    looked up there by HEAD. A blob arrives at `PUT /cdn/org/name/upload/SHA256`
    and, once stored, is told of at `POST /org/name.git/info/lfs/verify`. Xet
    moves bytes past the server: only its tokens are asked for here.

    Attributes:
        path: regular expression, searched in the path and query.
        method: str, or None for any.
        times: requests to spoil; None for all.
        skip: requests to let pass first; `skip=2` starts with the third.
        call: function of the request, run before the rest of it is read. To
            move a branch or kill a client; alone it changes nothing else.
        status: answer this status instead.
        headers: more headers of that answer, such as Retry-After.
        kind: `"truncate"`, `"reset"` and `"hang"` stop after `keep` bytes of
            the answer: with a clean close, with a reset, or until `release`
            is set. `"slow"` takes half a second over it. `"corrupt"` flips
            its last byte, `"corrupt_start"` its eighth, the top one of a
            header's length. `"drop"` resets after `keep` bytes of the
            request, before it is handled.
        keep: int. Defaults to half of the body. With 0 no header is sent.
        handled: whether a request answered with `status` is carried out
            first, as when a gateway times out.
        hits: how many requests it has met.
    """

    path: str = ""
    method: str | None = None
    times: int | None = 1
    skip: int = 0
    call: object = None
    status: int | None = None
    headers: dict = dataclasses.field(default_factory=dict)
    kind: str | None = None
    keep: int | None = None
    handled: bool = False
    hits: int = 0
    release: threading.Event = dataclasses.field(
        default_factory=threading.Event
    )

    def meets(self, request):
        """Count a request that it names; say whether to spoil it."""
        if self.method not in (None, request.method):
            return False
        if not re.search(self.path, request.path):
            return False
        self.hits += 1
        late = self.times is not None and self.hits > self.skip + self.times
        return self.hits > self.skip and not late


@dataclasses.dataclass
class Request:
    """One request as it came.

    `status` is None if it got no answer; `sent` counts the bytes of its body.
    """

    method: str
    path: str
    host: str
    token: str | None
    range: str | None
    status: int | None = None
    sent: int = 0
    body: object = dataclasses.field(default=None, repr=False)

    @property
    def query(self):
        query = urllib.parse.urlsplit(self.path).query
        return dict(urllib.parse.parse_qsl(query))

    def json(self):
        return json.load(self.body)


class HubServer(ThreadingHTTPServer):
    """The server. A context manager: it serves inside the `with`.

    Large files go to and come from a "CDN": the same port under the name
    localhost, since a client follows a redirect that stays on one host and
    then misses the commit header.

    Args:
        folder: path. Where repositories are kept, see `HubStore`.

    Attributes:
        url: the endpoint, on 127.0.0.1.
        cdn: the same on localhost.
        store: HubStore, to stage repositories and to look at them.
        tokens: dict from text to `Token`; starts as `TOKENS`.
        faults: list of `Fault`. The first that meets a request spoils it.
        requests: list of `Request`, in the order of arrival.
        crashes: tracebacks of mistakes in the server or in a fault's `call`;
            the first is raised at the end.
        page_size: rows in a page of a listing.
        part_size: bytes; larger LFS uploads come in parts. None for never.

    Example:
        with HubServer(tmp_path) as server:
            server.store.create("org/name")
            server.faults.append(Fault("/revision/main", status=503))
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"
        self.store = HubStore(folder)
        self.tokens = dict(TOKENS)
        self.faults = []
        self.requests = []
        self.crashes = []
        self.page_size = 1000
        self.part_size = None
        self._lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, kind, error, trace):
        for fault in self.faults:
            fault.release.set()
        self.shutdown()
        self.server_close()
        if self.crashes and error is None:
            raise RuntimeError(self.crashes[0])

    def seen(self, path="", method=None):
        """Requests so far whose path holds a regular expression."""
        return [
            request
            for request in list(self.requests)
            if method in (None, request.method)
            and re.search(path, request.path)
        ]

    def next_fault(self, request):
        with self._lock:
            return next((f for f in self.faults if f.meets(request)), None)

    def handle_error(self, request, client_address):
        """A client may leave at any time; all else is a mistake of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            self.crashes.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self):
        bearer = self.headers.get("Authorization")
        request = Request(
            method=self.command,
            path=self.path,
            host=self.headers["Host"].partition(":")[0],
            token=bearer and bearer.removeprefix("Bearer "),
            range=self.headers.get("Range"),
        )
        self.server.requests.append(request)
        fault = self.server.next_fault(request) or Fault()
        if fault.call:
            fault.call(request)
        length = int(self.headers.get("Content-Length", 0))
        if fault.kind == "drop":
            self.rfile.read(length // 2 if fault.keep is None else fault.keep)
            return self.cut(reset=True)
        with self.read_body(length) as request.body:
            if fault.status is None or fault.handled:
                reply = self.answer(request)
        if fault.status is not None:
            error = HubError(fault.status, "injected fault", **fault.headers)
            reply = Answer.of_error(error)
        self.send(request, reply, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def answer(self, request):
        at_cdn = request.path.startswith("/cdn/")
        try:
            # Storage takes signed addresses and refuses a token beside them.
            if at_cdn and (request.token or request.host != "localhost"):
                raise HubError(400, "Only one auth mechanism allowed")
            return answer(self.server, request)
        except HubError as error:
            return Answer.of_error(error)
        except Exception:
            self.server.crashes.append(traceback.format_exc())
            return Answer.of_error(HubError(500, "the test server crashed"))

    def read_body(self, length):
        """Read the whole body to a file; an error if the client leaves."""
        body = tempfile.SpooledTemporaryFile(PIECE)
        while length:
            piece = self.rfile.read(min(length, PIECE))
            if not piece:
                raise ConnectionError("the client left")
            body.write(piece)
            length -= len(piece)
        body.seek(0)
        return body

    def send(self, request, reply, fault):
        """Send an answer, or as much of it as the fault allows."""
        size = reply.stop - reply.start
        stops = fault.kind in ("truncate", "reset", "hang")
        keep = size // 2 if fault.keep is None else fault.keep
        keep = min(keep, max(size - 1, 0)) if stops else size
        silent = stops and (keep == 0 or self.command == "HEAD")
        if silent and fault.kind == "hang":
            fault.release.wait()
        elif silent:
            return self.cut(reset=fault.kind == "reset")
        request.status = reply.status
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "HEAD":
            return
        step = PIECE
        if fault.kind == "slow":
            step = -(-keep // SLOW_PIECES)
        for piece in reply.pieces(keep, step):
            if fault.kind == "slow":
                time.sleep(SLOW_SECONDS / SLOW_PIECES)
            if fault.kind == "corrupt_start" and request.sent == 0:
                piece = piece[:7] + bytes([piece[7] ^ 0xFF]) + piece[8:]
            last = request.sent + len(piece) == size
            if fault.kind == "corrupt" and last:
                piece = piece[:-1] + bytes([piece[-1] ^ 0xFF])
            self.wfile.write(piece)
            request.sent += len(piece)
        if fault.kind == "hang":
            fault.release.wait()
            reply.start += keep
            for piece in reply.pieces(size - keep):
                self.wfile.write(piece)
        elif stops:
            self.cut(reset=fault.kind == "reset")

    def cut(self, reset):
        """Close the connection in the middle of things."""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            os.close(self.connection.detach())

    def log_message(self, *args):
        pass
