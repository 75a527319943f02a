"""`hnclip serve`: listen, answer, stop."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from PIL import Image

from hnclip.search.index.reader import Index
from hnclip.search.options import ServeOptions

if TYPE_CHECKING:
    import uvicorn

    from hnclip.search.serve.service import Service

log = logging.getLogger(__name__)

GRACE = 5  # seconds that requests have to finish when the server stops
LOCAL = ("localhost",)


def serve(options: ServeOptions) -> None:
    """Serve an index until the process is told to stop.

    The server listens, and answers what needs no model, before torch is imported.

    Raises:
        ValueError: an option, the index or its model cannot be used.
        OSError: the port cannot be listened on.
    """
    _check_installed()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such pictures are refused, by their pixels
    token = checked_token(options)
    index = Index(options.index)
    try:
        listener = listen(options.host, options.port)
    except BaseException:
        index.close()
        raise
    with listener:
        service, server = make_server(options, index, listener, token)
        address = url(options.host, listener)
        if not token and not is_local(listener):
            log.warning(f"whoever reaches {address} can search and see the images: set a token with $HNCLIP_TOKEN")
        log.info(f"serving {options.index} at {address}   Ctrl-C stops it")
        service.keeper.start(failed=lambda: setattr(server, "should_exit", True))
        try:
            server.run(sockets=[listener])
        finally:
            ended = service.close(seconds=2.0)
    if service.keeper.failure is not None:
        raise service.keeper.failure
    log.info("stopped")
    if not ended:
        # A thread is in the middle of loading or computing. The interpreter cannot end it without a crash; nothing is
        # left to be done.
        sys.stderr.flush()
        os._exit(0)


def make_server(
    options: ServeOptions, index: Index, listener: socket.socket, token: str | None
) -> tuple[Service, uvicorn.Server]:
    """The server of an open index, on a socket that listens; the service is to be started and closed."""
    import uvicorn

    from hnclip.search.serve.app import make_app
    from hnclip.search.serve.keeper import Keeper
    from hnclip.search.serve.protocol import Protocol
    from hnclip.search.serve.service import Service

    class Server(uvicorn.Server):
        """uvicorn's, to which a signal is no error: that is how a server is stopped."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            signals = (signal.SIGINT, signal.SIGTERM)
            before: dict[int, Any] = {number: signal.signal(number, self.handle_exit) for number in signals}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    service = Service(Keeper(options, index), options)
    config = uvicorn.Config(
        make_app(service, options, token=token, hosts=own_names(options.host, listener, token)),
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    return service, Server(config)


def _check_installed() -> None:
    for name in ("fastapi", "uvicorn"):
        if find_spec(name) is None:
            raise ValueError(f"hnclip serve needs {name}: pip install 'hnclip[serve]'")


def checked_token(options: ServeOptions) -> str | None:
    """The token, from the options or from the environment.

    Raises:
        ValueError: it is none that a header could carry.
    """
    token = options.token if options.token is not None else os.environ.get("HNCLIP_TOKEN") or None
    if token is not None and (not token.strip() or token != token.strip() or not token.isprintable()):
        raise ValueError("the token must be one word or several, without spaces around them")
    return token


def listen(host: str, port: int) -> socket.socket:
    """A socket on this address.

    Raises:
        OSError: it is in use, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on port {port} of {host} ({error.strerror}): choose another with --port, 0 takes any that "
            "is free"
        ) from error
    return listener


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def own_names(host: str, listener: socket.socket, token: str | None) -> tuple[str, ...] | None:
    """Names that the server answers to beside addresses (`Guard`); any if others reach it and have to know a token."""
    if is_local(listener):
        return (*LOCAL, host.lower())
    if token is not None:
        return None
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return (*LOCAL, host.lower(), name, short, f"{short}.local")


def url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/"
