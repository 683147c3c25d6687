"""create_app(state): which path is served by what."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from orchestrator.serve import metrics, page, pipeline
from orchestrator.serve.answers import Completions, Shared
from orchestrator.serve.auth import HostCheck, KeyCheck, open_to_all
from orchestrator.serve.openai_ask import Endpoint
from orchestrator.serve.openai_errors import AGAIN, ApiError, no_model
from orchestrator.serve.pipeline import Readings
from orchestrator.serve.state import ServeState


def create_app(state: ServeState) -> Starlette:
    """The whole server. It opens the state's client when it starts, and closes it when it stops."""
    shared, readings = Shared(state), Readings(state.cluster, state.model)
    open_routes = [*page.routes(), Route("/healthz", _healthz), Route("/readyz", _readyz(state))]
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", Completions(state, shared, Endpoint.CHAT), methods=["POST"]),
        Route("/v1/completions", Completions(state, shared, Endpoint.TEXT), methods=["POST"]),
        *_models(state),
        *pipeline.routes(readings),
        *metrics.routes(state, readings),
        *open_routes,
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with state.client:
            yield

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=_middleware(state, open_routes),
        exception_handlers=dict.fromkeys((HTTPException, ApiError, Exception), _error),
    )


def _middleware(state: ServeState, open_routes: list[BaseRoute]) -> list[Middleware]:
    """The outermost first: a web page elsewhere may read what is refused to it."""
    chosen = []
    if state.access.origins:
        chosen.append(
            Middleware(
                CORSMiddleware,
                allow_origins=state.access.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if state.access.local_only:
        chosen.append(Middleware(HostCheck))
    if state.api_key is not None:
        chosen.append(Middleware(KeyCheck, key=state.api_key, is_open=open_to_all(open_routes)))
    return chosen


def _models(state: ServeState) -> list[BaseRoute]:
    name = state.model.name
    model = {"id": name, "object": "model", "created": int(state.started_at), "owned_by": "pptasks"}

    async def listed(request: Request) -> Response:
        state.observe.request("models", 200)
        return _json({"object": "list", "data": [model]})

    async def one(request: Request) -> Response:
        asked = request.path_params["name"]
        state.observe.request("models", 200 if asked == name else 404)
        if asked != name:
            raise no_model(asked, name)
        return _json(model)

    return [Route("/v1/models", listed), Route("/v1/models/{name:path}", one)]


async def _healthz(request: Request) -> Response:
    """The server is there, whatever the pipeline does."""
    return _json({"status": "ok"})


def _readyz(state: ServeState) -> Callable[[Request], Awaitable[Response]]:
    async def readyz(request: Request) -> Response:
        """Anybody may ask, so it does not say why not."""
        if state.health.reason:
            return _json({"status": "not ready"}, 503, AGAIN)
        return _json({"status": "ready"})

    return readyz


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, "application/json")


async def _error(request: Request, error: Exception) -> Response:
    """Ours, one of Starlette's router, or one that nobody expected: the server's log has that."""
    if isinstance(error, HTTPException):
        path = request.url.path[:100]
        of_a_router = {404: f"there is nothing at {path}", 405: f"{request.method} is not what {path} takes"}
        what = of_a_router.get(error.status_code, error.detail)
        error = ApiError(error.status_code, what, code="unknown_url", headers=dict(error.headers or {}))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log says why")
    return Response(error.to_json(), error.status, error.headers, "application/json")
