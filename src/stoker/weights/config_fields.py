"""Values of a config.json, checked for kind and size: an error names file, field, value and what was expected.

Whoever counts layers or parameters may rely on these bounds. No torch.
"""

from typing import Any

from stoker.errors import ConfigError, brief

# Upper bounds of sizes: far beyond the largest published (126 layers, 512 experts, vocabularies of 256,000, hidden
# states of 18,432), and small enough that listing all parameters of a config.json takes a moment.
LARGEST = {
    "num_hidden_layers": 1000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "head_dim": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 1 << 10,
    "block_size": 1 << 10,
    "max_position_embeddings": (1 << 31) - 1,
    "eos_token_id": (1 << 31) - 1,
}
LARGEST_NUMBER = 1 << 24  # for all other sizes: vocab_size, intermediate_size, ...
MOST_ENTRIES = 10_000  # in a list of numbers


class Fields:
    """Reads required and optional values of a JSON object, with errors that name file and field."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value, most = self._present(name, default), LARGEST.get(name, LARGEST_NUMBER)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        if value > most:
            raise self.error(name, f"at most {most:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integers(self, name: str, default: list[int] | None = None) -> tuple[int, ...]:
        value, most = self._present(name, default), LARGEST.get(name, LARGEST_NUMBER)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise self.error(name, "a list of whole numbers")
        if len(value) > MOST_ENTRIES or any(v > most for v in value):
            raise self.error(name, f"at most {MOST_ENTRIES:,} numbers of at most {most:,}")
        return tuple(value)

    def object(self, name: str) -> "Fields":
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {brief(self.values.get(name))}, expected {expected}.")

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where}: the field {name} is missing.")
        return value
