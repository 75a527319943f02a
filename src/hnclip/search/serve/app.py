"""The HTTP API: what is asked where, how it is checked, who answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from hnclip import __version__
from hnclip.search.index.layout import Kind
from hnclip.search.options import ServeOptions
from hnclip.search.serve.decoding import Decoders, when_ended
from hnclip.search.serve.failures import Refused, busy, documented, failure, invalid
from hnclip.search.serve.guard import SESSION, UPLOAD, Door, Guard
from hnclip.search.serve.openapi import describe, picture_answer, picture_body
from hnclip.search.serve.page_files import page_files
from hnclip.search.serve.pictures import SHOWN, Shown, converted, decode_upload, original, original_size, thumbnail
from hnclip.search.serve.questions import Explain, Search, Separate
from hnclip.search.serve.schema import (
    ExplainRequest,
    Explanation,
    Health,
    Id,
    Info,
    SearchAnswer,
    SearchRequest,
    SeparateAnswer,
    SeparateRequest,
    SessionRequest,
    plain,
)
from hnclip.search.serve.service import Service
from hnclip.search.serve.waiting import answered, ready

Result = TypeVar("Result")

UPLOADS = 8  # pictures that are in memory at once as they were sent
ORIGINALS = 8  # pictures of the index that are in memory while clients take them,
LARGE = 16_000_000  # and one more of those with more bytes than this
THUMBNAILS = 4  # that are read at once


def make_app(
    service: Service, options: ServeOptions, *, token: str | None = None, hosts: Collection[str] | None = None
) -> FastAPI:
    """
    Args:
        token: that clients have to know; none when left out.
        hosts: names that the server answers to, any when left out (`Guard`).
    """
    app = FastAPI(
        title="hnclip",
        version=__version__,
        description="Find pictures by a long description.",
        redirect_slashes=False,
        openapi_url=None,  # a route below has it; the pages that show it would load scripts from elsewhere
    )
    door, page = Door(token), page_files()
    app.add_middleware(Guard, options=options, door=door, hosts=hosts, page=page)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    _add_information(app, service, door)
    decoders = Decoders(options.timeout)
    _add_searches(app, service, options, decoders)
    _add_details(app, service, options)
    _add_pictures(app, service, options, decoders)
    described = describe(app, options, locked=door.locked)
    app.openapi = lambda: described  # type: ignore[method-assign]  # FastAPI would describe it anew
    app.add_api_route("/openapi.json", app.openapi, include_in_schema=False)

    async def give(request: Request) -> Response:
        return _given(request, page[request.url.path])

    for path in page:
        app.add_api_route(path, give, include_in_schema=False)
    return app


def _add_information(app: FastAPI, service: Service, door: Door) -> None:
    counting = asyncio.Semaphore(1)  # a large catalogue takes a while, and is counted once

    @app.get("/healthz", responses=documented(421, 500))
    async def health() -> Health:
        """Whether the server is there, and ready to search."""
        return service.health()

    @app.get("/api/index", responses=documented(401, 421, 500))
    async def index() -> Info:
        """What is served, and how large requests may be."""
        async with counting:
            return await run_in_threadpool(service.info)

    @app.post(
        SESSION,
        status_code=204,
        response_class=Response,
        responses=documented(400, 401, 408, 413, 415, 421, 422, 500),
    )
    async def session(request: Request, asked: SessionRequest) -> Response:
        """A cookie for the token, for pages: their pictures cannot send a header."""
        if not door.knows(asked.token.encode()):
            raise Refused(401, "this is not the token", {"WWW-Authenticate": 'Bearer realm="hnclip"'})
        return Response(status_code=204, headers={"Set-Cookie": door.cookie(request.scope)} if door.locked else {})


def _add_searches(app: FastAPI, service: Service, options: ServeOptions, decoders: Decoders) -> None:
    failures = documented(400, 401, 408, 413, 415, 421, 422, 500, 503, 504)
    uploads = asyncio.Semaphore(UPLOADS)

    @app.post("/api/search", responses=failures)
    async def search(request: Request, asked: SearchRequest) -> SearchAnswer:
        """Find pictures or captions by a description."""
        _check(options, text=asked.text, k=asked.k)
        rerank = asked.rerank and asked.find == "images"
        question = Search(k=asked.k, find=asked.find, text=asked.text, rerank=rerank)
        return await answered(service, request, service.details if rerank else service.searches, question)

    @app.post(UPLOAD, responses=failures, openapi_extra=picture_body())
    async def search_image(
        request: Request,
        k: Annotated[int, Query(ge=1, description="How many results."), BeforeValidator(plain)] = 24,
        find: Kind = "images",
    ) -> SearchAnswer:
        """Find pictures or captions by a picture: the body of the request."""
        _check(options, k=k)
        if uploads.locked():
            raise busy("others are sending pictures: try again soon")
        await uploads.acquire()
        work = None
        try:
            content = b"".join([part async for part in request.stream()])
            await ready(service)
            work = await decoders.start(_pixels, service, content, options.max_pixels)
            del content
            pixels = await decoders.result(work)
        finally:
            when_ended(work, uploads.release)
        return await answered(service, request, service.searches, Search(k=k, find=find, pixels=pixels))


def _add_details(app: FastAPI, service: Service, options: ServeOptions) -> None:
    failures = documented(400, 401, 404, 408, 413, 415, 421, 422, 500, 503, 504)

    @app.post("/api/explain", responses=failures)
    async def explain(request: Request, asked: ExplainRequest) -> Explanation:
        """Which words of a description match which parts of a picture."""
        _check(options, text=asked.text)
        return await answered(service, request, service.details, Explain(asked.text, asked.id))

    @app.post("/api/separate", responses=failures)
    async def separate(request: Request, asked: SeparateRequest) -> SeparateAnswer:
        """Which words of a description separate pictures that are nearly the same."""
        _check(options, text=asked.text)
        return await answered(service, request, service.details, Separate(asked.text, tuple(asked.ids)))


def _add_pictures(app: FastAPI, service: Service, options: ServeOptions, decoders: Decoders) -> None:
    small, originals, large = asyncio.Semaphore(THUMBNAILS), asyncio.Semaphore(ORIGINALS), asyncio.Semaphore(1)

    def look(get: Callable[..., Result], *given: Any) -> Result:
        with service.keeper.borrow() as view:
            return get(view.index, *given)

    @app.get(
        "/api/pictures/{id:int}",
        response_class=Response,
        responses={
            **picture_answer(*dict.fromkeys(SHOWN.values())),
            **documented(401, 404, 410, 421, 422, 500, 503, 504),
        },
    )
    async def picture(request: Request, id: Annotated[Id, Path()]) -> Response:
        """A picture as it was indexed; as JPEG if browsers do not show its format."""
        place = originals if await run_in_threadpool(look, original_size, id) <= LARGE else large
        try:
            await asyncio.wait_for(place.acquire(), options.timeout)
        except asyncio.TimeoutError:
            raise busy() from None
        work = None
        try:
            shown = await run_in_threadpool(look, original, id)
            if not shown.type:
                work = await decoders.start(look, converted, id, shown.content, options.max_pixels)
                shown = await decoders.result(work)
            return _given(request, shown, release=place.release)
        except BaseException:
            when_ended(work, place.release)
            raise

    @app.get(
        "/api/pictures/{id:int}/thumbnail",
        response_class=Response,
        responses={**picture_answer("image/jpeg"), **documented(401, 404, 421, 422, 500)},
    )
    async def small_picture(request: Request, id: Annotated[Id, Path()]) -> Response:
        """A small JPEG of a picture."""
        async with small:
            return _given(request, await run_in_threadpool(look, thumbnail, id))


class _Given(Response):
    """An answer that is in memory until the client has taken it, and gives its place free then."""

    release: Callable[[], object] = staticmethod(lambda: None)

    async def __call__(self, *given: Any) -> None:
        try:
            await super().__call__(*given)
        finally:
            self.release()


def _given(request: Request, shown: Shown, release: Callable[[], object] | None = None) -> Response:
    """What a client gets, or nothing new if it has that already."""
    headers = {"ETag": shown.tag, "Cache-Control": "private, no-cache"}  # keep it, and ask whether it is still that
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if shown.tag in known or "*" in known:
        response = _Given(status_code=304, headers=headers)
    else:
        response = _Given(shown.content, headers={**headers, "Content-Type": shown.type})
    if release is not None:
        response.release = release
    return response


def _pixels(service: Service, content: bytes, most: int) -> Any:
    """What the model sees of a picture that was sent."""
    picture = decode_upload(content, most)
    try:
        return service.pixels(picture)
    except ValueError as error:
        raise Refused(422, str(error)) from error


def _check(options: ServeOptions, *, text: str = "", k: int = 1) -> None:
    """Limits that are the server's own."""
    if len(text) > options.max_text:
        raise Refused(422, f"text: it has {len(text):,} characters, at most {options.max_text:,} are read")
    if k > options.max_k:
        raise Refused(422, f"k: at most {options.max_k} results are given, not {k:,}")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    own = isinstance(error, Refused)  # others have sentences of their own, and not always the same
    return failure(error.status_code, error.detail if own else None, error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return failure(*invalid(error.errors()))
