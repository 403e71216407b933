"""A Python process of its own that talks to a test server."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

# Waits of a second and more are written down instead of slept through.
PROGRAM = """
import json, sys, time, traceback

waits, sleep = [], time.sleep
time.sleep = lambda s: waits.append(s) if s >= 1 else sleep(s)


def attempt(function, *args, **options):
    first = len(waits)
    row = {"value": None, "errors": [], "kinds": [], "message": ""}
    try:
        row["value"] = function(*args, **options)
    except BaseException as error:
        traceback.print_exc()
        row["message"] = str(error)
        row["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        while error is not None:
            row["errors"].append(type(error).__name__)
            error = error.__cause__ or error.__context__
    return row | {"waits": waits[first:]}


names = json.loads(sys.argv[2]) | {"attempt": attempt}
outcome = attempt(exec, compile(sys.argv[1], "<client>", "exec"), names)
outcome["value"] = names.get("result")
print("\\n" + json.dumps(outcome, default=str))
"""


@dataclasses.dataclass
class Outcome:
    """What a client's code came to.

    Attributes:
        errors: class names of the error and of those that caused it.
        kinds: class names of the error and of its base classes.
        message: text of the error.
        waits: seconds of each wait that the code asked for.
        seconds: wall time, without those waits.
        log: standard error, with the traceback.
    """

    errors: list
    kinds: list
    message: str
    waits: list
    seconds: float
    log: str
    _value: object

    @property
    def value(self):
        """What the code left in `result`; an error if the code failed."""
        assert not self.errors, self.log
        return self._value


class HubClient:
    """Runs code against a server, in a fresh process for each call.

    huggingface_hub reads its environment once, at import, so two settings
    need two processes. The code finds HfApi, hf_hub_download and
    snapshot_download imported, leaves its value in `result`, and may call
    `attempt(function, *args, **options)`, which gives a dict of the value or
    the error, named as in `Outcome`.

    Args:
        server: HubServer.
        home: path. The client's HF_HOME; share it to share the cache.
        token: str or None, for no token at all.
        xet: bool. True for Xet, False for LFS.
        environment: more environment variables.

    Example:
        client = HubClient(server, tmp_path, token="hf_write")
        outcome = client.run("result = HfApi().whoami()['name']")
        assert outcome.value == "alice"
    """

    START = (
        "from huggingface_hub import HfApi, hf_hub_download\n"
        "from huggingface_hub import snapshot_download\n"
    )

    def __init__(self, server, home, *, token=None, xet=False, **environment):
        home = pathlib.Path(home)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not re.match(r"HF_|HUGGING|.*_proxy$", name, re.IGNORECASE)
        }
        self.environment = kept | {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(home),
            "HF_XET_CACHE": str(home / "xet"),
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        if token is not None:
            self.environment["HF_TOKEN"] = token
        self.environment |= environment

    def start(self, code, **values):
        """Start code with `values` as its names; return the process."""
        code = self.START + textwrap.dedent(code)
        names = json.dumps(values, default=str)
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, code, names],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code, *, timeout=60, **values):
        """Run code to its end; return an `Outcome`."""
        started = time.monotonic()
        with self.start(code, **values) as process:
            try:
                output, log = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        seconds = time.monotonic() - started
        assert process.returncode == 0, log
        outcome = json.loads(output.splitlines()[-1])
        return Outcome(
            _value=outcome.pop("value"), seconds=seconds, log=log, **outcome
        )
