"""Which addresses a page may reach: an allow-list of hosts, held by Chromium's resolver for every protocol."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

_ENTRY = re.compile(r"(?:(?:https?|wss?)://)?((?:\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?/?")
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@dataclass(frozen=True)
class Allowed:
    """(host, port) pairs; a host may begin with "*." for all below it."""

    hosts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, entries: Iterable[str]) -> Allowed:
        """From "host" (ports 80 and 443), "host:port", or an origin such as "http://127.0.0.1:8000".

        Raises ValueError for anything else.
        """
        if isinstance(entries, str):
            raise ValueError(f"allow= is a list of hosts: [{entries!r}]")
        hosts: list[tuple[str, int]] = []
        for entry in entries:
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise ValueError(f'{entry!r} is no host: write "example.org", "*.example.org" or "127.0.0.1:8000"')
            scheme = entry.partition("://")[0] if "://" in entry else ""
            ports = [int(match[2])] if match[2] else [_PORTS[scheme]] if scheme else [80, 443]
            hosts += [(match[1].lower(), port) for port in ports]
        return cls(tuple(hosts))

    def permits(self, url: str) -> bool:
        """Whether the address is http, https, ws or wss on an allowed host and port."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            return False
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return any(
            port == allowed and (host == name or (name.startswith("*.") and host.endswith(name[1:])))
            for name, allowed in self.hosts
        )

    def resolver_rules(self) -> str:
        """For --host-resolver-rules: what holds where requests cannot be intercepted (redirects, workers, sockets)."""
        kept = [f"MAP {name}:{port} {name}:{port}" for name, port in self.hosts if not name.startswith("*.")]
        # A pattern cannot be mapped to itself; subdomains are excluded on all ports, and held to theirs by the routes.
        kept += [f"EXCLUDE {name}" for name, _ in self.hosts if name.startswith("*.")]
        return ", ".join([*kept, "MAP * ~NOTFOUND"])
