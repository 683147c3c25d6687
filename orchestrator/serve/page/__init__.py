"""The page of `pp serve`: a chat, and the pipeline as it works. Plain files beside this one, without a build step.

It loads nothing from elsewhere, and its Content-Security-Policy lets it load nothing from elsewhere. What a model or a
worker says is put into it as text, never as HTML: Trusted Types are required, and no policy for them exists.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
INDEX = "index.html"
FILES = tuple(sorted(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES and path.name != INDEX))
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # kept, and asked for again: a newer server has a newer page
}


def routes() -> list[BaseRoute]:
    """`/`, and `/static/NAME` for each file of the page; nobody needs a key for them."""
    return [Route("/", _index), *(Route(f"/static/{name}", _file) for name in FILES)]


async def _index(request: Request) -> Response:
    return _served(INDEX)


async def _file(request: Request) -> Response:
    return _served(request.url.path.rpartition("/")[2])


def _served(name: str) -> Response:
    return FileResponse(_FOLDER / name, media_type=_TYPES[Path(name).suffix], headers=HEADERS)
