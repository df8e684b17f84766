"""The chat page at /, its files, and the server state that it shows."""

import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import stoker
from stoker import demo
from stoker.server.errors import ApiError
from stoker.server.lifecycle.service import Service

router = APIRouter()
FOLDER = Path(__file__).parent.parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# never a path from a request
FILES = {file.relative_to(FOLDER).as_posix(): file for file in FOLDER.rglob("*") if file.suffix in KINDS}
# What a model writes reaches the page only through the sanitiser, which is the only one that may make markup of text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MB, GIB = 10**6, 2**30


@router.get("/", include_in_schema=False)
async def index() -> Response:
    return _file("index.html")


@router.get("/page/{name:path}", include_in_schema=False)
async def file(name: str) -> Response:
    return _file(name)


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """The state of the server and its caches, as the page shows it."""
    service: Service = request.app.state.service
    phase, stats, memory = service.supervisor.phase, service.supervisor.stats, service.memory.latest
    return {
        "model": service.config.names[0],
        "about": about(service.config.directory),
        "demo": service.config.directory == demo.EMBEDDED,
        "version": stoker.__version__,
        "draft": service.config.draft,
        "context": service.context,
        "ready": service.ready,
        "phase": phase.name,
        "detail": phase.detail,
        "percent": phase.percent,
        "at": time.monotonic(),
        "counts": asdict(service.metrics.counts),
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


@cache
def about(directory: Path) -> str:
    """What the model is, in a few words."""
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    if directory == demo.EMBEDDED:
        return f"{size / MB:.0f} MB demonstration model, not an assistant"
    return f"{size / GIB:.1f} GiB on disk" if size >= GIB else f"{size / MB:.0f} MB on disk"


def _file(name: str) -> Response:
    if name not in FILES:
        raise ApiError(404, f"The page has no file {name[:100]!r}.")
    found = FILES[name]
    return Response(found.read_bytes(), media_type=KINDS[found.suffix], headers=HEADERS)
