"""How large an engine the server starts, from what it was asked for and what the machine has to give."""

from stoker.engine.config import EngineConfig
from stoker.model.cache import PAGE_SIZE
from stoker.model.config import ModelConfig
from stoker.server.config import ServerConfig
from stoker.speculate.choice import DraftChoice

DEFAULT_CONTEXT = 32768


def plan_engine(config: ServerConfig) -> tuple[EngineConfig, int]:
    """The engine's sizes, and the most tokens of one request."""
    model = ModelConfig.load(config.directory)
    context = min(config.context or DEFAULT_CONTEXT, model.max_positions)
    pages = -(-context // PAGE_SIZE) * config.users
    depth = DraftChoice.parse(config.draft).depth
    return EngineConfig(
        pages=pages, slots=config.users, max_depth=depth, checkpoints=8 * config.users, kv_dtype=config.kv_dtype
    ), context
