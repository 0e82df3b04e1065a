"""A server's address: its URL, taken apart once."""

import urllib.parse

import attrs

from ..errors import SettingsError


@attrs.frozen(kw_only=True)
class Address:
    """One server's address. ``url`` is the normalised form that messages and mappings use."""

    url: str
    tls: bool
    host: str
    """Name or IP address without brackets; ``localhost`` for a unix socket."""
    port: int
    unix_path: str | None
    """Path of the unix socket to connect to, in place of host and port."""
    prefix: str
    """Path in front of every route: ``""`` or ``/base``."""

    @property
    def host_header(self) -> str:
        """Value of the Host header: IPv6 in brackets, no default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.unix_path or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def _refuse(url: str, why: str) -> SettingsError:
    return SettingsError(
        f"server URL {url!r}: {why}; allowed: http://host:port[/prefix], https://host[:port][/prefix], unix:/path/to/socket"
    )


def parse_url(url: str) -> Address:
    """Parse a server's URL.

    Raises:
      SettingsError: the URL is not ``http://``, ``https://`` or ``unix:/path``, or has a user, a query or a fragment.

    """
    try:
        parts = urllib.parse.urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise _refuse(url, str(error)) from error
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise _refuse(url, "a user, a query or a fragment has no meaning here")
    if parts.scheme == "unix":
        path = parts.path
        if parts.netloc or not path.startswith("/"):
            raise _refuse(url, "a unix socket needs an absolute path")
        return Address(url=f"unix:{path}", tls=False, host="localhost", port=80, unix_path=path, prefix="")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise _refuse(url, "it has no scheme or no host")
    if not (parts.netloc + parts.path).isascii() or any(char.isspace() for char in parts.netloc + parts.path):
        raise _refuse(url, "only ASCII without spaces can be sent")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    return Address(
        url=f"{parts.scheme}://{parts.netloc}{prefix}",
        tls=tls,
        host=parts.hostname,
        port=port if port is not None else (443 if tls else 80),
        unix_path=None,
        prefix=prefix,
    )
