"""Settings of the server. Every limit is on by default."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from vitrail.settings import byte_count, problems, raise_problems, setting

TOKEN_VARIABLE = "VITRAIL_TOKEN"
"""Environment variable with the default token of a server."""

HOST_NAME = re.compile(r"[\w.-]+|[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*")
"""Name of a host, or its address."""

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+")
"""Origin of a web page, as browsers send it."""


def is_loopback(host: str) -> bool:
    """Return True for a name or an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `vitrail serve`. Raise `ConfigError` if a value is out of its range."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only; 0.0.0.0 is every network."""
    port: int = setting(8000, least=0, most=65535)
    """Port to listen on. 0 chooses a free port."""
    token: str | None = None
    """Secret that requests must send as `Authorization: Bearer TOKEN`. The default is the environment variable
    VITRAIL_TOKEN, and without it no token is needed. Probes and the empty page need no token."""
    allow_host: tuple[str, ...] = ()
    """Names in the header `Host` that are answered besides localhost and its addresses. Without a token, a server on a
    loopback address refuses all other names, because a web site could point its own name at this machine."""
    allow_origin: tuple[str, ...] = ()
    """Origins of web pages that may read the answers (CORS), such as https://flowers.example, or * for all. By default
    only the server's own page may."""
    workers: int = setting(1, least=1, most=1024)
    """Processes that answer requests to the port, each with its own copy of the models, its part of the compute threads
    and its own limits. A process that dies is started again."""
    watch: bool = False
    """Replace a model when its files change, without losing a request. Each model is read from a private copy of its
    files."""
    max_batch: int | None = setting(None, least=1)
    """Largest number of images that are computed together. By default it is measured at the start, up to 16."""
    batch_threads: int | None = setting(None, least=1, most=4096)
    """Compute threads of a batch that is computed alone. Batches that are computed at the same time divide all threads.
    By default it is measured at the start: as many as make a single image faster."""
    max_body: str = setting("16MB", metavar="SIZE")
    """Largest body of a request. A larger one is answered by 413."""
    max_images: int = setting(64, least=1)
    """Largest number of images in one request. More are answered by 413."""
    max_pixels: int = setting(50_000_000, least=1)
    """Largest number of pixels of an image, which its header states. Larger images are answered by 422 and are not
    decoded."""
    max_queue: int = setting(256, least=1)
    """Largest number of images that the server has accepted and not answered. Requests beyond it are answered by 503
    with Retry-After."""
    max_connections: int = setting(512, least=1)
    """Largest number of open connections. Further connections are answered by 503 and closed."""
    body_memory: str = setting("256MB", metavar="SIZE")
    """Largest total size of the bodies of all requests that are received or answered at one time. Requests beyond it
    are answered by 503 with Retry-After."""
    receive_seconds: float = setting(10.0, above=0, below=math.inf)
    """Seconds for receiving the headers of a request, and again for its body. Slower clients are answered by 408."""
    keep_alive_seconds: float = setting(5.0, above=0, below=math.inf)
    """Seconds after which a connection without a request is closed. Behind a proxy it should be more than the proxy
    keeps its connections, often 60."""
    deadline_seconds: float = setting(30.0, above=0, below=math.inf)
    """Seconds after which an image that still waits is dropped and answered by 503."""
    drain_seconds: float = setting(1.0, least=0, below=math.inf)
    """Seconds after SIGTERM in which requests are still accepted while the probe `ready` answers 503, so that a load
    balancer can take the server out."""

    def __post_init__(self) -> None:
        raise_problems(problems(self))
        is_sendable = self.token is None or (self.token.isprintable() and self.token == self.token.strip() != "")
        rules = (
            (
                is_sendable,
                "token: it is empty, begins or ends with a space, or has control characters, so that no request could "
                "send it; give another one, or none at all for a server without a token",
            ),
            (
                self.max_images <= self.max_queue,
                f"max_images={self.max_images} is more than max_queue={self.max_queue}, so such a request could never "
                "be accepted; choose a larger queue",
            ),
            *(
                (
                    HOST_NAME.fullmatch(name),
                    f"allow_host={name!r} is not the name of a host, which has no scheme, port or path; give for "
                    "example flowers.example",
                )
                for name in self.allow_host
            ),
            *(
                (
                    ORIGIN.fullmatch(origin),
                    f"allow_origin={origin!r} is not an origin, which is a scheme and a host without a path; give for "
                    "example https://flowers.example, or * for all",
                )
                for origin in self.allow_origin
            ),
            (self.body_bytes >= 1, f"max_body={self.max_body} is less than 1 byte, so every request would be refused"),
            (
                self.body_bytes <= self.body_memory_bytes,
                f"max_body={self.max_body} is more than body_memory={self.body_memory}, so such a request could never "
                "be accepted; choose more memory for bodies",
            ),
        )
        raise_problems(problem for holds, problem in rules if not holds)

    @property
    def checks_host(self) -> bool:
        """True if only requests with a known name in their header `Host` are answered."""
        return bool(self.allow_host) or (is_loopback(self.host) and not self.token)

    @property
    def body_bytes(self) -> int:
        """Largest body of a request in bytes."""
        return byte_count(self.max_body, "max_body")

    @property
    def body_memory_bytes(self) -> int:
        """Largest total size of the bodies of all requests in bytes."""
        return byte_count(self.body_memory, "body_memory")
