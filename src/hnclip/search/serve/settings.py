"""Where the server listens and how much it accepts."""

from __future__ import annotations

from dataclasses import dataclass


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
