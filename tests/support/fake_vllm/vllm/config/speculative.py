from typing import Literal

Mtp = Literal["mtp", "qwen3_5_mtp"]
SpeculativeMethod = Literal["ngram", "dflash", Mtp]
