"""Routes as data: one table leads requests to their handlers and describes them in openapi.json."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import compile_path

from penstock.protocol.errors import MethodNotAllowed, NotFound, RequestError
from penstock.services.http.request_context import RequestContext

MAX_SHOWN = 200  # characters of a path
UNKNOWN_PATH = "unknown_path"  # an error's code

Handler = Callable[[Any, RequestContext], Awaitable[None]]  # called with the application's state


class Access(enum.Enum):
    """Who may ask."""

    KEY = "key"  # clients with a key, on a server that has keys
    OPEN = "open"  # everybody: the answer is the same on every server
    PROBE = "probe"  # everybody, by any host name: the answer is yes or no


class Route(msgspec.Struct, frozen=True):
    """One method of one path. What follows the handler is the description; without a summary there is none."""

    method: str
    path: str
    handler: Handler
    summary: str = ""
    answer: type | None = None  # None: text of the type `media`
    body: type | None = None
    streams: bool = False
    access: Access = Access.KEY
    quiet: bool = False  # logged at debug and not traced, as all routes without a key are
    statuses: tuple[int, ...] = ()
    media: str = "text/plain"
    query: tuple[Mapping[str, Any], ...] = ()

    name: str = ""  # the path as metrics, log and description have it

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", self.path.replace(":path", ""))


Methods = Mapping[str, Route]
Found = tuple[Methods, Mapping[str, Any]]  # a path's routes by method, and its parameters


class Router:
    """Finds the routes of a path: `exact` those of paths without parameters. `prefix` is what clients leave out of a
    path or say twice. `elsewhere` has paths that are not among the routes, and where they are."""

    def __init__(self, routes: Sequence[Route], prefix: str, elsewhere: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._elsewhere = elsewhere
        self._paths: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._paths.setdefault(route.path, {})[route.method] = route
        self.exact: Mapping[str, Found] = {path: (found, {}) for path, found in self._paths.items() if "{" not in path}
        self._patterns = [(*compile_path(path)[::2], methods) for path, methods in self._paths.items() if "{" in path]

    def find(self, path: str) -> Found:
        """No routes: nothing is at this path."""
        if path in self.exact:
            return self.exact[path]
        for pattern, convertors, routes in self._patterns:
            if found := pattern.match(path):
                return routes, {name: convertors[name].convert(value) for name, value in found.groupdict().items()}
        return {}, {}

    def refusal(self, methods: Methods, method: str, path: str) -> RequestError:
        """Why no route of a path, which has `methods`, answers `method`."""
        shown = path[:MAX_SHOWN]
        if methods:
            allowed = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
            message = f"{method} is not allowed on {shown}; allowed: {allowed}"
            return MethodNotAllowed(message, allowed=allowed)
        near = self._near(path)
        suggestion = f"; {near} is served" if near else self._elsewhere.get(path, "")
        return NotFound(f"there is nothing at {shown}{suggestion}", code=UNKNOWN_PATH)

    def _near(self, path: str) -> str:
        """The path that is meant where a base URL lacks the prefix or has it twice, a slash is too many, or a plural is
        missing."""
        bare = path.rstrip("/")
        whole = (bare, self._prefix + bare, bare.removeprefix(self._prefix))
        candidates = (*whole, *(found + "s" for found in whole))
        return next((candidate for candidate in candidates if candidate in self._paths), "")
