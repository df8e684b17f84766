"""Runs lm-eval's loglikelihood requests (echo with logprobs) against a served model, and records what came out.

Needs `lm_eval[api]` and transformers: python benchmarks/server/harness/run.py URL MODEL TOKENIZER_FOLDER RESULT.json
"""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]


def main(url: str, model: str, tokenizer: str, result: str) -> None:
    folder = Path(__file__).parent
    os.chdir(folder)  # the task names its data by a relative path
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer,
            "num_concurrent": 2,
            "max_length": 2048,
        },
        tasks=["stoker_endings"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = found["samples"]["stoker_endings"]
    document = {
        "command": "python benchmarks/server/harness/run.py URL MODEL TOKENIZER_FOLDER RESULT.json",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers")}
        | {"python": platform.python_version()},
        "model": model,
        "accuracy": found["results"]["stoker_endings"]["acc,none"],
        "loglikelihoods": [[pair[0] for pair in sample["filtered_resps"]] for sample in samples],
    }
    Path(result).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
