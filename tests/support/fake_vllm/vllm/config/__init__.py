import dataclasses


@dataclasses.dataclass
class SpeculativeConfig:
    method: str = ""
    model: str = ""
    num_speculative_tokens: int = 0
