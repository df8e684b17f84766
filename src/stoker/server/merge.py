"""Several answers of one request as one stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from stoker.server.generation import Delta, Generation


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all choices, each with its place, as they come. The first error ends them all."""
    if len(generations) == 1:
        async for delta in generations[0].deltas():
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    async def read(place: int, generation: Generation) -> None:
        async for delta in generation.deltas():
            queue.put_nowait((place, delta))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for place, generation in enumerate(generations):
                    group.create_task(read(place, generation))
        finally:
            queue.put_nowait(None)

    reading = asyncio.create_task(read_all())
    try:
        while (entry := await queue.get()) is not None:
            yield entry
        try:
            await reading
        except* Exception as group:
            raise group.exceptions[0] from None
    finally:
        reading.cancel()
