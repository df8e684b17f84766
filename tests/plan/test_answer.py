"""Plan, pick and evidence as people and scripts meet them, on a machine without torch."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tools.seeds import figures, lines, predicted
from tools.seeds import page as seeds_page
from typer.testing import CliRunner, Result

from stoker.cli.main import COMMANDS, app
from stoker.errors import StokerError
from stoker.plan.answer import Answer, Question, answer
from stoker.plan.catalog import names_of_rows
from stoker.plan.explain import explain
from stoker.plan.pick import NEEDS, pick
from stoker.report.plan_text import screen

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")
WITHOUT_TORCH = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}));"
DFLASH = Question("122b", "spark", context=100_000, recipe="hybrid-dflash12")


def stoker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_TORCH} from stoker.cli.main import run; run()", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


def here(*arguments: str) -> Result:
    """In this process, which is faster; errors stay exceptions."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


def advice_of(found: Answer) -> str:
    return "\n".join(f"{a.text} ({a.because})" for a in found.advice)


def imported_by(*arguments: str) -> set[str]:
    """What is loaded when such a command is through."""
    code = "import sys\nfrom stoker.cli.main import app\napp(sys.argv[1:], standalone_mode=False)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    ["plan 122b --box spark --json", f"plan 122b --box spark --explain --html {os.devnull}", "pick --box spark --json"],
)
def test_planning_imports_nothing_that_is_slow_to_import(arguments: str) -> None:
    """A plan is there in a fraction of a second: no tensors, no servers, no files' formats, no other command."""
    modules = imported_by(*arguments.split())
    slow = {
        "torch", "numpy", "transformers", "safetensors", "tokenizers", "aiohttp", "fastapi", "msgspec", "pydantic",
        "importlib.metadata", "pygments", "rich.markdown", "rich._emoji_codes", "stoker.bench", "stoker.server",
        "stoker.engine", "stoker.weights.checkpoint", "tools.plan_fit",
    }  # fmt: skip
    assert modules & slow == set()
    assert {name for name in COMMANDS if f"stoker.cli.{name}" in modules} == {arguments.split()[0]}
    assert "rich" not in modules


def test_plan_in_json_has_the_contracts_keys() -> None:
    options = "--context 128k --users 4 --weights nvfp4 --draft mtp:2 --accept-length 2.5 --workload chat --engine vllm"
    done = stoker("plan", "122b", "--box", "spark", *options.split(), "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert set(plan) >= {"fits", "memory", "speed", "evidence"}
    assert set(plan["memory"]) >= {"items", "free_bytes"}
    assert all(set(item) == {"name", "bytes"} and isinstance(item["bytes"], int) for item in plan["memory"]["items"])
    assert set(plan["speed"]) >= {"tokens_per_s", "low", "high", "limit_tokens_per_s"}
    assert plan["context"] == 131_072
    assert plan["speed"]["acceptance"] == "asked for"
    assert plan["evidence"][0]["source"]
    total = sum(item["bytes"] for item in plan["memory"]["items"])
    assert plan["memory"]["free_bytes"] == plan["memory"]["capacity_bytes"] - total


def test_pick_and_evidence_in_json() -> None:
    rows = json.loads(here("pick", "--box", "spark", "--need", "chat", "--json").stdout)["rows"]
    assert all(set(row) >= {"model", "weights", "fits", "tokens_per_s", "evidence"} for row in rows)
    assert {row["model"] for row in rows if not row["fits"]} == {"Qwen3-235B-A22B", "Qwen3.5-397B-A17B"}
    assert all(row["missing_bytes"] > 0 for row in rows if not row["fits"])
    listed = json.loads(here("evidence", "235b", "--json").stdout)
    assert len(listed["rows"]) == 5
    assert len(json.loads(here("evidence", "235b", "--box", "2xspark", "--json").stdout)["rows"]) == 5
    assert json.loads(here("evidence", "235b", "--box", "spark", "--json").stdout)["rows"] == []
    pair = json.loads(here("pick", "--box", "2xspark", "--json").stdout)["rows"]
    assert all(row["boxes"] == 2 for choice in pair for row in choice["evidence"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "122x", "--box", "spark"), ("Did you mean Qwen3.5-122B-A10B",)),
        (("plan", "122b", "--box", "sparc"), ("Did you mean spark",)),
        (("plan", "122b", "--box", "spark", "--context", "lots"), ("--context lots",)),
        (("plan", "122b", "--box", "spark", "--users", "0"), ("at least 1",)),
        (("plan", "122b", "--box", "spark", "--workload", "poetry"), ("unknown workload", "prose")),
        (("plan", "122b", "--box", "spark", "--recipe", "magic"), ("unknown recipe", "hybrid-mtp2")),
        (("pick", "--box", "spark", "--need", "speed"), ("agent, chat, batch, long-context",)),
        (("evidence", "gemma-5"), ("Did you mean gemma",)),
    ],
)
def test_mistakes_are_sentences_with_a_way_out(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    error = here(*arguments).exception
    assert isinstance(error, StokerError)
    assert all(word in str(error) for word in words), error


def test_a_mistake_on_the_command_line() -> None:
    done = stoker("plan", "122x", "--box", "spark")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "Did you mean" in done.stderr


def test_what_people_see() -> None:
    done = here("plan", "122b", "--box", "spark", "--weights", "bf16", "--explain")
    assert done.exit_code == 0, done.exception
    said = " ".join(done.stdout.split())
    assert "Does not fit: " in said
    assert re.search(r"[\d,]+ bytes \(\d+\.\d GiB\) are missing", said)
    assert "predicted" in said
    assert "physical limit" in said


def test_the_explanation_adds_up() -> None:
    found = answer(DFLASH)
    text = "\n".join(explain(found))
    memory = [
        int(m.replace(",", ""))
        for m in re.findall(r"^ +([\d,]+)  (?:weights|drafter|KV|recurrent|graphs|runtime|host|reserve)", text, re.M)
    ]
    assert sum(memory) == found.budget.total
    milliseconds = [float(m) for m in re.findall(r"^ +([\d.]+) ms  (?!a step)", text, re.M)]
    assert sum(milliseconds) == pytest.approx(1e3 * found.speed.step_s, abs=0.05)
    assert found.speed.factor * found.speed.accepted / found.speed.step_s == pytest.approx(found.speed.tokens_per_s)


def test_advice_a_practitioner_would_give() -> None:
    nvfp4 = answer(Question("122b", "spark", weights="nvfp4", kv="fp8", context=131_072, users=4, utilization=0.9))
    said = advice_of(nvfp4)
    assert "NVFP4 brings no speed here" in said
    assert "m042" in said
    assert "0.90 leaves 12.2 GiB" in said
    assert "collapse per-user speed" in said
    assert "6.2 with four" in said
    depth = advice_of(answer(DFLASH))
    prose, agent = (int(re.search(rf"(\d+) for {text}", depth)[1]) for text in ("prose", "agent"))  # type: ignore[index]
    assert prose <= 4 < 10 <= agent
    assert "FP8 KV" in depth
    assert not any("NVFP4" in a.text for a in answer(Question("122b", "spark", weights="int4")).advice)
    assert "too few" not in said


@pytest.mark.parametrize("box", ["spark", "2xspark", "strix-halo", "rtx-5090", "dual-w7900", "h200"])
@pytest.mark.parametrize("need", sorted(NEEDS))
def test_picks_are_in_order_and_honest(box: str, need: str) -> None:
    _, wanted, choices = pick(box, need)
    ranks = [(not c.fits, not c.meets) for c in choices]
    assert ranks == sorted(ranks)
    for choice in choices:
        assert choice.speed.tokens_per_s <= choice.speed.limit
        assert choice.fits == (choice.budget.free_bytes >= 0)
        assert not choice.meets or choice.speed.tokens_per_s >= wanted.least
        assert all(row.model.lower() in names_of_rows(choice.model) for row in choice.evidence)
    assert [c.model.name for c in choices].count("Qwen3.5-122B-A10B") == 1


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        "plan 122b --box spark",
        "plan 122b --box spark --draft mtp:2",
        "plan 122b --box spark --weights nvfp4 --draft mtp:2 --kv fp8 --context 108k --users 4",
        "plan gpt-oss-120b --box spark",
        "plan deepseek-v4-flash --box mem=256GB,bw=273GB/s",
        "plan 122b --box 5090",
    ],
)
def test_a_plan_is_one_screen_that_ends_with_commands(arguments: str, width: int) -> None:
    done = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.exception
    lines = done.stdout.splitlines()
    assert len(lines) <= (46 if width == 60 else 40)
    assert max(map(len, lines)) <= width
    assert re.search(r"^(Fits|Does not fit): ", done.stdout, re.M)
    assert re.search(r"≈ [\d.]+ tok/s predicted \(\d+ to \d+", " ".join(lines))
    after = lines[lines.index("To run it:") + 1 :]
    assert re.match(r"  (stoker|vllm|hf|llama-server) ", after[0])


def test_commands_read_as_one_by_a_shell() -> None:
    done = here("plan", "qwen3.6-35b", "--box", "spark", "--draft", "mtp:2", "--weights", "nvfp4-mixed")
    block = done.stdout.split("To run it:\n")[1].split("\n\n")[0]
    words = shlex.split(block.split("    # ")[0].replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "nvidia/Qwen3.6-35B-A3B-NVFP4"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 2}
    assert {"--tool-call-parser", "--reasoning-parser", "--enable-auto-tool-choice"} <= set(words)
    assert answer(Question("122b", "spark", draft="mtp:2")).commands[0].line == "stoker up qwen3.5-122b-hybrid-mtp2"
    built = [command.line for command in answer(Question("122b", "spark", draft="mtp:4")).commands]
    assert built[0].startswith("hf download Intel/Qwen3.5-122B-A10B-int4-AutoRound")
    assert "--shared-experts hf:Qwen/Qwen3.5-122B-A10B-FP8 --lm-head int8" in built[1]
    assert built[2].startswith("stoker serve --model fast --draft mtp:4")


def test_the_drafter_is_the_fastest_that_the_engine_supports_with_the_reason() -> None:
    best = answer(Question("122b", "spark"))
    assert str(best.ask.draft) == "dflash:12"
    assert "fastest that vLLM supports" in best.choice.because
    general = {str(line.draft): line.general.tokens_per_s for line in best.compared}
    assert general["dflash:12"] == max(general.values())
    llama = answer(Question("122b", "strix-halo"))
    assert llama.ask.draft.kind == "mtp"  # llama.cpp has no DFlash that anybody measured
    slow = answer(Question("122b", "spark", draft="mtp:2"))
    assert "dflash:12 is the fastest" in slow.choice.because
    assert answer(Question("gpt-oss-120b", "spark")).ask.draft.kind == "none"


def test_prompts_of_several_users_count_as_far_as_they_are_not_cached() -> None:
    def together(fresh: int | None) -> float:
        asked = Question(
            "122b", "spark", weights="nvfp4", draft="mtp:2", kv="fp8", context=108_000, users=4, fresh=fresh
        )
        return answer(asked).speed.tokens_per_s

    cold, turn, cached = together(108_000), together(None), together(64)
    assert cold < 5 < turn < 25 < cached
    found = answer(Question("122b", "spark", users=4, context=108_000))
    assert found.cold is not None
    assert found.cold.tokens_per_s < found.speed.tokens_per_s
    assert answer(Question("122b", "spark")).cold is None


def test_one_number_of_requests_at_a_time() -> None:
    found = answer(
        Question("122b", "spark", draft="mtp:2", context=131_072, weights="nvfp4", kv="fp8", utilization=0.9)
    )
    assert found.budget.pool is not None
    assert found.concurrent == int(found.budget.pool.concurrency) == 12
    assert f"{found.concurrent:,} requests" in " ".join(screen(found, 80))
    assert "vLLM would count" not in "\n".join(screen(found, 80))


def test_which_box_and_several_boxes_are_compared() -> None:
    rows = json.loads(here("plan", "122b", "--boxes", "--json").stdout)["rows"]
    assert {"box", "fits", "tokens_per_s", "evidence", "price_usd", "price_source"} <= set(rows[0])
    assert "measured" in here("plan", "122b", "--boxes").stdout
    pair = json.loads(here("pick", "--box", "spark", "--box", "strix-halo", "--need", "chat", "--json").stdout)["rows"]
    assert {row["box"] for row in pair} == {"spark", "strix-halo"}
    shown = CliRunner().invoke(app, ["pick", "--box", "spark", "--box", "mac"], env={"COLUMNS": "60"}).stdout
    assert max(map(len, shown.splitlines())) <= 60


def test_evidence_lists_its_models_and_boxes() -> None:
    shown = CliRunner().invoke(app, ["evidence"], env={"COLUMNS": "60"}).stdout
    assert {"Qwen3.5-122B-A10B", "DeepSeek-V4-Flash-0731", "spark", "strix-halo"} <= set(shown.split())
    listed = json.loads(here("evidence", "--box", "2x spark", "--json").stdout)
    assert {entry["box"] for entry in listed["boxes"]} == {"spark"}
    assert "gpt-oss-120b" in {entry["model"] for entry in listed["models"]}


def test_the_embedded_model_on_this_machine(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    done = stoker("plan", "demo", "--box", "this", "--html", str(target))
    assert done.returncode == 0, done.stderr
    assert "this machine" in done.stdout
    assert target.read_text().startswith("<!doctype html>")


def test_every_figure_of_the_documents_has_a_verdict() -> None:
    found = lines()
    assert len(found) == len(figures()) > 250
    assert {line.figure.document for line in found} == {"000", "001", "002", "003", "004"}
    for line in found:
        assert line.verdict.startswith(("reproduced", "contradicted", "cannot be run here")), line.figure.figure
        if "above the limit" in line.figure.remark or "above the physical limit" in line.figure.remark:
            published = float(line.figure.value.partition("..")[0])
            limit = re.search(r"limit (\d+)", line.predicted)
            assert limit is not None
            assert published > float(limit[1]), line.figure.figure


def test_cards_of_32_and_48_gb_cannot_hold_the_122b() -> None:
    for card in (32, 48):
        assert predicted(f"fits card={card} weights=int4")[1].startswith("does not fit")
    assert predicted("fits card=96 weights=int4")[1].startswith("fits")


def test_the_stored_page_of_figures_is_the_current_one() -> None:
    stored = Path(__file__).parents[2] / "docs" / "seeds.md"
    assert stored.read_text(encoding="utf-8") == seeds_page(), "run: make seeds"
