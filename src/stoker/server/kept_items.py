"""Items of past answers by their id, so that /v1/responses can be sent references instead of the items again."""

import json
from collections import OrderedDict
from typing import Any

MOST_CHARACTERS = 64 * 1024 * 1024  # of all items that are kept; the oldest go first


class KeptItems:
    """In memory only: a restart forgets them. Used from several threads, each operation being one of the dict's."""

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._size = most, 0
        self._items: OrderedDict[str, str] = OrderedDict()

    def keep(self, item: dict[str, Any]) -> None:
        text = json.dumps(item)
        self._items[item["id"]] = text
        self._size += len(text)
        while self._size > self._most:
            _, oldest = self._items.popitem(last=False)
            self._size -= len(oldest)

    def find(self, item_id: str) -> dict[str, Any] | None:
        text = self._items.get(item_id)
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found
