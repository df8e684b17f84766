"""The packaged prompts are those the generators make today, and fit the model."""

from training.prompts import FIRST, agent_turn, invoice

from stoker.demo import EMBEDDED, prompts
from stoker.engine.tokenizer import Tokenizer
from stoker.weights.model_config import ModelConfig


def test_generated_prompts_are_up_to_date() -> None:
    for place in (0, 7, 49):
        assert prompts()["JSON"][place] == invoice(FIRST + place)
        assert prompts()["agent"][place] == agent_turn(FIRST + place)


def test_every_kind_has_fifty_that_fit_the_context() -> None:
    tokenizer, config = Tokenizer(EMBEDDED), ModelConfig.load(EMBEDDED)
    for kind in ("JSON", "agent", "code", "prose"):
        texts = prompts()[kind]
        assert len(texts) == len(set(texts)) == 50
        longest = max(len(tokenizer.encode(text)) for text in texts)
        assert 0 < longest < config.max_positions // 4
