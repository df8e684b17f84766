"""Models, tokenisation, health, readiness, version and metrics."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import stoker
from stoker.server.endpoints.body import BodyRoute, in_thread, large_json
from stoker.server.errors import ApiError
from stoker.server.lifecycle.service import Service
from stoker.server.metrics import CONTENT_TYPE
from stoker.server.prepare.template import template_messages, template_tools
from stoker.server.schemas.completions import DetokenizeRequest, TokenizeRequest

LARGE = 1 << 18  # bytes of text, or tokens, from which requests are processed one at a time
router = APIRouter(route_class=BodyRoute)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    service = _service(request)
    return {"object": "list", "data": [_model(service, name) for name in service.config.names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    service = _service(request)
    if name not in service.config.names and not service.config.any_model:
        raise ApiError(404, f"There is no model {name[:200]!r} here.", code="model_not_found")
    return _model(service, name)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    service = _service(request)
    service.model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt, a text, or messages, a conversation.")
    large = len(await request.body()) > LARGE
    tokens = await in_thread(large, _tokens, service, body)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = await in_thread(large, lambda: list(map(service.model.token_text, tokens)))
    return await large_json(found)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    served = _service(request).model
    served.check_name(body.model)
    outside = next((token for token in body.tokens if not 0 <= token < served.vocab_size), None)
    if outside is not None:
        raise ApiError(400, f"token id {outside} is outside the vocabulary of {served.vocab_size:,}.", param="tokens")
    return await large_json({"prompt": await in_thread(len(body.tokens) > LARGE, served.decode, body.tokens)})


@router.get("/health", responses={503: {"description": "the engine has crashed and is being started again"}})
async def health(request: Request) -> Response:
    """200 while the server works or loads for the first time; 503 from a crash until the engine is up again."""
    supervisor = _service(request).supervisor
    found: dict[str, Any] = {"status": supervisor.phase.name if supervisor.healthy else "engine down"}
    if supervisor.fault:
        found["reason"] = supervisor.fault
    return JSONResponse(found, 200 if supervisor.healthy else 503)


@router.get("/ready", responses={503: {"description": "not yet, and how far it is"}})
async def ready(request: Request) -> Response:
    """200 when requests are accepted, with the seconds that each phase of the start took; until then 503 with the
    phase, its percentage and the seconds left of it."""
    service = _service(request)
    supervisor = service.supervisor
    phase = supervisor.phase
    found: dict[str, Any] = {
        "ready": service.ready,
        "phase": "stopping" if service.draining else phase.name,
        "detail": phase.detail or None,
        "percent": phase.percent,
        "eta_s": None if phase.eta_s is None else round(phase.eta_s, 1),
    }
    if service.config.assume_acceptance is not None:
        found["acceptance_assumed"] = service.config.assume_acceptance
    if service.ready:
        found["ready_s"] = None if supervisor.ready_s is None else round(supervisor.ready_s, 3)
        found["phases"] = [{**asdict(each), "seconds": round(each.seconds, 3)} for each in supervisor.start_phases]
        return JSONResponse(found)
    try:
        service.check_ready()
    except ApiError as error:
        return JSONResponse(found, 503, error.headers)
    return JSONResponse(found, 503, {"retry-after": "1"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": stoker.__version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "stoker",
        "root": service.config.names[0],
        "parent": None,
        "max_model_len": service.context,
    }


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return service.model.encode(body.prompt or "")
    messages = template_messages(body.messages, service.config.max_messages)
    begin = True if body.add_generation_prompt is None else body.add_generation_prompt
    return service.model.render(messages, template_tools(body.tools), begin, body.chat_template_kwargs)
