"""A Hugging Face Hub on loopback, for tests with the real client.

It speaks what huggingface_hub 2.x asks of a model repository: LFS and Xet
uploads, commits, pull requests, revisions, listings and downloads. `HubServer`
serves, `HubStore` holds the repositories, `Fault` says what goes wrong, and
`HubClient` runs code in a fresh process against it.
"""

from hub_server.access import Token
from hub_server.client import HubClient
from hub_server.client import Outcome
from hub_server.server import Fault
from hub_server.server import HubServer
from hub_server.server import Request
from hub_server.store import HubStore

__all__ = [
    "Fault",
    "HubClient",
    "HubServer",
    "HubStore",
    "Outcome",
    "Request",
    "Token",
]
