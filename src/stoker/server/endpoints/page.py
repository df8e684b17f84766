"""The chat page at /, its files, and the server state that it shows."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.server.errors import ApiError
from stoker.server.lifecycle.service import Service

router = APIRouter()
FOLDER = Path(__file__).parent.parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {file.name: file for file in FOLDER.iterdir() if file.suffix in KINDS}  # never a path from a request
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def index() -> Response:
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    return _file(name)


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """The state of the server and its caches, as the page shows it."""
    service: Service = request.app.state.service
    phase, stats, memory = service.supervisor.phase, service.supervisor.stats, service.memory.latest
    return {
        "model": service.config.names[0],
        "draft": service.config.draft,
        "context": service.context,
        "ready": service.ready,
        "phase": phase.name,
        "detail": phase.detail,
        "percent": phase.percent,
        "engine": stats
        and {
            "pid": service.supervisor.engine and service.supervisor.engine.pid,
            "running": stats.running,
            "waiting": stats.waiting,
            "slots": stats.slots,
            "pages": stats.pages,
            "pages_held": stats.pages_used - stats.pages_cached,
            "pages_cached": stats.pages_cached,
            "checkpoints": stats.snapshots,
            "cache_bytes": stats.cache_bytes,
        },
        "memory": memory and {"available": memory.available, "total": memory.total, "reserve": service.memory.reserve},
    }


def _file(name: str) -> Response:
    if name not in FILES:
        raise ApiError(404, f"The page has no file {name[:100]!r}.")
    found = FILES[name]
    return Response(found.read_bytes(), media_type=KINDS[found.suffix], headers=HEADERS)
