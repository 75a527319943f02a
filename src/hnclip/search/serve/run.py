"""`hnclip serve` as a process: socket, uvicorn, messages, signals."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

    from hnclip.search.database import EngineName
    from hnclip.search.searcher import Searcher

CONNECTIONS = 256  # at once; further ones get status 503
GRACE = 3  # seconds that requests have to finish when the server stops

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on. With an address other than loopback, anyone who can reach it can search: set a
    token. Without a token, requests must address the server by an IP address or the machine's own name."""
    port: int = 8765
    """Port; 0 for any free one."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    waiting: int = 32
    """Length of the request queue; further requests get status 503."""
    timeout: float = 30.0
    """Seconds after which a request is cancelled."""
    max_k: int = 200
    """Maximum number of hits per request."""
    max_text: int = 20_000
    """Maximum number of characters of a description."""
    max_upload: int = 20_000_000
    """Maximum size of an uploaded image in bytes."""
    max_pixels: int = 50_000_000
    """Maximum number of pixels of an uploaded image."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("--host must be an address; 0.0.0.0 is for all interfaces")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}")
        for name in ("waiting", "max_k", "max_text", "max_upload", "max_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"--timeout must be a number of seconds above 0, got {self.timeout}")
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")


def serve(
    index: Path,
    settings: Settings,
    *,
    token: str | None = None,
    engine: EngineName | None = None,
    model: str | None = None,
    device: str = "auto",
) -> None:
    """Serve an index until SIGINT or SIGTERM.

    Args:
        token: that clients must present; if None, the one in $HNCLIP_TOKEN.

    Raises:
        ValueError: an option or the index cannot be used.
        OSError: the port cannot be listened on.
    """
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ValueError(f"the server needs {package}: pip install 'hnclip[search]'")
    from hnclip.search.searcher import open_index

    token = checked_token(token)
    with listen(settings.host, settings.port) as listener:
        # By its whole path, so that errors that name the index are told from those that a client may read.
        searcher = open_index(index.absolute(), engine=engine, model=model, device=device)
        server = make_server(searcher, listener, settings, token)
        address = url(settings.host, listener)
        if token is None and not is_local(listener):
            log.warning(f"anyone who can reach {address} can search and see the images: set a token with $HNCLIP_TOKEN")
        log.info(f"serving {index} at {address}   Ctrl-C stops it")
        with suppress(KeyboardInterrupt):  # at its end uvicorn raises the signal that stopped it once more
            server.run(sockets=[listener])
    log.info("stopped")


def make_server(searcher: Searcher, listener: socket.socket, settings: Settings, token: str | None) -> uvicorn.Server:
    """The server of a searcher, which it closes when it stops, on a socket that listens. It is run with
    `server.run(sockets=[listener])`; in another thread it is stopped by `server.should_exit = True`."""
    import uvicorn

    from hnclip.search.serve.app import make_app
    from hnclip.search.serve.security import HEADERS
    from hnclip.search.serve.service import Service

    hosts = own_names(settings.host, listener, token)
    return uvicorn.Server(
        uvicorn.Config(
            make_app(Service(searcher, settings), token=token, hosts=hosts),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",  # the application logs what fails
            access_log=False,
            proxy_headers=False,
            headers=list(HEADERS.items()),
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
    )


def checked_token(token: str | None) -> str | None:
    """The token of the option or of the environment; ValueError if a header cannot contain it."""
    found = os.environ.get("HNCLIP_TOKEN") or None if token is None else token
    if found is not None and (not found or found != found.strip() or not found.isprintable()):
        raise ValueError("the token must consist of printable characters without spaces around them")
    return found


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; ValueError or OSError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host} is not an address of this machine: {error}") from error
    try:
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        reason = f"cannot listen on port {port} of {host} ({error.strerror})"
        raise OSError(f"{reason}: choose another with --port; 0 takes any that is free") from error


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def own_names(host: str, listener: socket.socket, token: str | None) -> tuple[str, ...] | None:
    """Names that the server answers to besides IP addresses; None for any, if others can reach it but need a token."""
    if is_local(listener):
        return ("localhost", host.lower())
    if token is not None:
        return None
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return ("localhost", host.lower(), name, short, f"{short}.local")


def url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/"
