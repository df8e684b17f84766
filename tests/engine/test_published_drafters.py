"""DFlash configs in the spellings z-lab has published, in small: each loads, is counted and drafts without loss."""

from pathlib import Path
from typing import Any

import pytest

from stoker.backends.cpu.drafting import CpuDFlash
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter
from stoker.engine.engine import EngineConfig
from stoker.errors import ConfigError
from stoker.sizes.memory import caches_of
from stoker.sizes.network import Drafter, Network
from stoker.sizes.step import DFLASH, Draft
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import SLIDING, ModelConfig
from tests.engine.drive import DEPTH, PAGES, SLOTS, drain, engine_on, settings_for
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

FULL = "full_attention"
TRUNK = small_config()
MASK = TRUNK["vocab_size"] - 1


def config_of(layers: list[str], window: int | None, taps: list[int] | None, **own: Any) -> dict[str, Any]:
    """Without block_size, which each variant puts somewhere."""
    dflash = {"mask_token_id": MASK, **({"target_layer_ids": taps} if taps else {}), **own}
    changes = {"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": window}
    return small_drafter_config(TRUNK, **changes, dflash_config=dflash)


SWA = {"use_swa": True, "swa_window_size": 16}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-4B-b16": config_of([FULL] * 5, None, [0, 1, 2, 3, 3]) | {"block_size": 8},
    "Qwen3.6-27B": config_of([SLIDING] * 4 + [FULL], 16, [0, 1, 2, 3, 3]) | {"block_size": 8},
    "122B, April": config_of([SLIDING] * 3 + [FULL], 16, [0, 1, 1, 2, 2, 3], block_size=8),
    "122B, June": config_of([SLIDING] * 5 + [FULL], 32, [0, 0, 1, 1, 2, 2, 3, 3], block_size=8),
    "use_swa": config_of([FULL] * 2, None, [1, 3], block_size=8, **SWA),
    "use_swa at the top": config_of([FULL] * 2, None, [1, 3], block_size=8) | SWA,
    "taps by the formula": config_of([FULL] * 2, None, None, block_size=8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_drafting_with_a_published_config_changes_no_token(
    name: str, model: Decoder, prompts: list[list[int]], alone: list[list[int]], tmp_path: Path
) -> None:
    write_random_drafter(tmp_path, PUBLISHED[name])
    drafter = CpuDFlash(model, load_drafter(tmp_path, model.config), PAGES)
    engine = engine_on(model, EngineConfig(pages=PAGES, slots=SLOTS, max_depth=DEPTH, prefill_budget=128), drafter)
    for index, prompt in enumerate(prompts[:4]):
        engine.submit(prompt, settings_for(index), depth=DEPTH)
    tokens = drain(engine)
    assert [tokens[index] for index in range(4)] == alone[:4]


def test_layers_windows_taps_and_blocks_are_those_of_the_config() -> None:
    found = {name: DFlashConfig.from_dict(raw) for name, raw in PUBLISHED.items()}
    april, june = found["122B, April"], found["122B, June"]
    assert (len(april.layer_types), april.sliding_window, len(april.taps)) == (4, 16, 6)
    assert (len(june.layer_types), june.sliding_window, len(june.taps)) == (6, 32, 8)
    assert {config.block_size for config in found.values()} == {8}
    for name in ("use_swa", "use_swa at the top"):
        assert (found[name].layer_types, found[name].sliding_window, found[name].causal) == ((SLIDING,) * 2, 16, False)
    # keys and values of every token are kept in every layer, whatever its window
    trunk = ModelConfig.from_dict(TRUNK)
    networks = [Network.of(trunk, drafter=Drafter.of(config)) for config in (april, june)]
    tokens = [caches_of(network, "stoker", "bf16", Draft(DFLASH, 4)).draft_token for network in networks]
    assert tokens[1] * 4 == tokens[0] * 6


def test_taps_without_a_list_are_where_z_labs_code_puts_them() -> None:
    raw = config_of([FULL] * 8, None, None, block_size=16) | {"num_target_layers": 48}
    assert DFlashConfig.from_dict(raw).taps == (1, 7, 14, 20, 26, 32, 39, 45)


def test_dflash2_is_refused_by_its_name_with_what_to_use() -> None:
    raw = PUBLISHED["122B, June"] | {"architectures": ["DFlash2DraftModel"]}
    with pytest.raises(ConfigError, match=r"DFlash2DraftModel.*Use a DFlash drafter .* --draft mtp"):
        DFlashConfig.from_dict(raw)


def test_two_windows_that_differ_are_refused() -> None:
    raw = config_of([SLIDING, FULL], 48, [1, 3], block_size=8, swa_window_size=16)
    with pytest.raises(ConfigError, match="is 16 and 48; expected one number"):
        DFlashConfig.from_dict(raw)
