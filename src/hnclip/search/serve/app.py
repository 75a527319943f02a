"""The HTTP API and the web page."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from hnclip import __version__
from hnclip.search.database import Kind
from hnclip.search.reader import IndexedImage, IndexReader
from hnclip.search.serve.images import decode_upload, original, thumbnail
from hnclip.search.serve.run import Settings
from hnclip.search.serve.security import UPLOAD, Auth, BodyLimit, HostCheck
from hnclip.search.serve.service import Pool, Service, check_model

if TYPE_CHECKING:
    from hnclip.search.searcher import Searcher

Id = Annotated[int, Field(ge=0, le=2**53 - 1)]  # JavaScript does not distinguish larger ones
K = 24  # hits, if a request does not say how many and the server gives so many
UPLOADS = 8  # uploaded images in memory at once
LONGEST = 500  # characters of an error: some contain names that the client sent
BINARY = {"schema": {"type": "string", "format": "binary"}}
IMAGE_BODY = {"requestBody": {"required": True, "content": {"image/*": BINARY}}}
IMAGE: dict[int | str, dict[str, Any]] = {200: {"description": "The image", "content": {"image/*": BINARY}}}

log = logging.getLogger(__name__)


class StrictModel(BaseModel):
    """Refuses unknown fields, so that a misspelt one is not ignored, and other types, such as "24" for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SearchRequest(StrictModel):
    text: str = Field(description="The description; what exceeds the model's context is cut.")
    k: int | None = Field(None, ge=1, description=f"Number of hits; {K} if not given.")
    find: Kind = "images"
    rerank: bool = Field(False, description="Re-rank the best images by words and patches; not for captions.")


class ExplainRequest(StrictModel):
    text: str
    id: Id


class SeparateRequest(StrictModel):
    text: str
    ids: list[Id] = Field(min_length=2, max_length=8)


class SessionRequest(StrictModel):
    token: str


class ErrorResponse(BaseModel):
    """Why a request failed, in one sentence."""

    error: str


def make_app(service: Service, *, token: str | None, hosts: Collection[str] | None) -> FastAPI:
    """
    Args:
        token: that clients must present, if there is one.
        hosts: names that the server answers to besides IP addresses; None for any.
    """
    auth = None if token is None else Auth(token)
    app = FastAPI(
        title="hnclip",
        version=__version__,
        description="Search images by long descriptions.",
        lifespan=lambda _: service.running(),
        redirect_slashes=False,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        dependencies=[] if hosts is None else [Depends(HostCheck(hosts))],
        responses={status: {"model": ErrorResponse, "description": "Error"} for status in ("4XX", "5XX")},
    )
    app.add_middleware(BodyLimit, settings=service.settings)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))  # is not sent
    app.add_exception_handler(Exception, _internal_error)
    _add_public_routes(app, auth)
    api = APIRouter(prefix="/api", dependencies=[] if auth is None else [Depends(auth)])
    _add_index_routes(api, service)
    _add_search_routes(api, service)
    _add_image_routes(api, service)
    app.include_router(api)
    return app


def _add_public_routes(app: FastAPI, auth: Auth | None) -> None:
    page = StaticFiles(packages=[("hnclip.search.serve", "page")])
    app.mount("/page", page)

    @app.get("/", include_in_schema=False)
    async def index_page(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Whether the server runs."""
        return {"status": "ok"}

    @app.post("/api/session", status_code=204, response_class=Response)
    async def session(request: Request, query: SessionRequest) -> Response:
        """Exchange the token for a cookie."""
        response = Response(status_code=204)
        if auth is not None:
            auth.start_session(request, response, query.token)
        return response


def _add_index_routes(api: APIRouter, service: Service) -> None:
    settings = service.settings

    @api.get("/index")
    async def index() -> dict[str, Any]:
        """What is served, and the limits of requests."""

        def read(searcher: Searcher) -> dict[str, Any]:
            reader = searcher.reader
            return {
                "name": reader.path.absolute().stem,
                "images": reader.count("images"),
                "captions": reader.count("captions"),
                "problems": len(reader.problems()),
                "model": reader.about.source,
                "engine": searcher.engine_of("images"),
                "limits": {
                    "k": settings.max_k,
                    "text": settings.max_text,
                    "upload": settings.max_upload,
                    "pixels": settings.max_pixels,
                },
            }

        return await service.run(service.reading, read)

    @api.get("/problems")
    async def problems() -> dict[str, list[dict[str, str]]]:
        """The files that could not be indexed."""

        def read(searcher: Searcher) -> dict[str, list[dict[str, str]]]:
            reader = searcher.reader
            root = "" if reader.root is None else f"{reader.root}{os.sep}"  # of names; details contain whole paths
            found = [{name: text.replace(root, "") for name, text in asdict(one).items()} for one in reader.problems()]
            return {"problems": found}

        return await service.run(service.reading, read)


def _add_search_routes(api: APIRouter, service: Service) -> None:
    settings, uploads = service.settings, asyncio.Semaphore(UPLOADS)

    async def answer(compute: Callable[[Searcher], dict[str, Any]], *, model: bool = True) -> Response:
        def call(searcher: Searcher) -> Response:
            if model:
                check_model(searcher)
            try:
                found = compute(searcher)
            except KeyError as error:
                raise HTTPException(404, "there is no such image") from error
            except ValueError as error:
                if str(searcher.reader.path) in str(error):  # about the index, with paths: not for the client
                    raise
                raise HTTPException(422, str(error)) from error
            return JSONResponse(found)  # here and not in the event loop: explanations are large

        return await service.run(service.modelling if model else service.searching, call)

    @api.post("/search")
    async def search(query: SearchRequest) -> Response:
        """Find images or captions by a description."""
        _check_text(query.text, settings)
        k = _checked_k(query.k, settings)

        def compute(searcher: Searcher) -> dict[str, Any]:
            found = searcher.search(query.text, k=k, find=query.find, rerank=query.rerank)
            return found.to_dict(paths=False)

        return await answer(compute, model=query.rerank)

    @api.post(UPLOAD.removeprefix("/api"), openapi_extra=IMAGE_BODY)
    async def search_by_image(
        request: Request, k: Annotated[int | None, Query(ge=1)] = None, find: Kind = "images"
    ) -> Response:
        """Find images or captions by an image, the body of the request."""
        count = _checked_k(k, settings)
        if not request.headers.get("content-type", "").lower().startswith("image/"):
            raise HTTPException(415, "the Content-Type must be that of an image: image/…")
        async with uploads:
            content = await request.body()

            def compute(searcher: Searcher) -> dict[str, Any]:
                image = decode_upload(content, settings.max_pixels)
                return searcher.search(image=image, k=count, find=find).to_dict(paths=False)

            return await answer(compute)

    @api.post("/explain")
    async def explain(query: ExplainRequest) -> Response:
        """Which words of a description match which parts of an image."""
        _check_text(query.text, settings)
        return await answer(lambda searcher: searcher.explain(query.text, [query.id])[0].to_dict())

    @api.post("/separate")
    async def separate(query: SeparateRequest) -> Response:
        """Which words of a description separate images that are nearly the same."""
        _check_text(query.text, settings)
        return await answer(lambda searcher: searcher.separate(query.text, query.ids).to_dict())


def _add_image_routes(api: APIRouter, service: Service) -> None:
    async def answer(
        request: Request,
        id: int,
        pool: Pool,
        read: Callable[[IndexReader, IndexedImage], tuple[bytes, str]],
        part: str = "",
    ) -> Response:
        file = await service.run(service.reading, lambda searcher: searcher.reader.file(id))
        if file is None:
            raise HTTPException(404, f"there is no image {id}")
        # The tag follows from the stored hash: a client that has the image already costs no reading of files.
        headers = {"ETag": f'"{file.hash.hex()}{part}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        content, type = await service.run(pool, lambda searcher: read(searcher.reader, file))
        return Response(content, media_type=type, headers=headers)

    @api.get("/images/{id}", response_class=Response, responses=IMAGE)
    async def image(request: Request, id: Id) -> Response:
        """An image as it was indexed, or a JPEG of it if browsers do not show its format."""
        read = partial(original, max_pixels=service.settings.max_pixels)
        return await answer(request, id, service.converting, read)

    @api.get("/images/{id}/thumbnail", response_class=Response, responses=IMAGE)
    async def small_image(request: Request, id: Id) -> Response:
        """A small JPEG of an image."""
        return await answer(request, id, service.reading, thumbnail, "-thumbnail")


def _check_text(text: str, settings: Settings) -> None:
    if len(text) > settings.max_text:
        raise HTTPException(422, f"text: it has {len(text):,} characters, at most {settings.max_text:,} are accepted")


def _checked_k(k: int | None, settings: Settings) -> int:
    if k is not None and k > settings.max_k:
        raise HTTPException(422, f"k: at most {settings.max_k:,} hits are given, not {k:,}")
    return k or min(K, settings.max_k)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    text = message if len(message) <= LONGEST else f"{message[: LONGEST - 1]}…"
    encodable = text.encode("utf-8", "backslashreplace").decode()  # JSON may contain half a surrogate pair
    return JSONResponse({"error": encodable}, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return _error(error.status_code, error.detail, error.headers)


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI parses nothing else
        return _error(415, "the Content-Type must be application/json")
    places = [(".".join(map(str, one["loc"][1:])) or "body", one["msg"]) for one in error.errors()[:3]]
    return _error(422, "; ".join(f"{place}: {message}" for place, message in places))


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s %r failed", request.method, request.url.path, exc_info=error)
    # starlette raises the error once more after this response, and uvicorn closes the connection then.
    return _error(500, "the server failed: its log says why", {"Connection": "close"})
