"""Run a script on simulated devices, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

SIMULATED = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    # Collectives of simulated devices can hang when launched asynchronously.
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "JAX_PLATFORMS": "cpu",
}


@pytest.fixture(scope="session")
def run_on_eight_devices():
    """Run Python code on 8 CPU devices; return the JSON of its last line."""

    def run(code, *arguments):
        process = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, **SIMULATED},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(process.stdout.splitlines()[-1])

    return run
