"""Recipes of vllm-project/recipes: a model with variants, features, and changes for each kind of hardware."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.recipes.formats.flags import Option, write
from stoker.recipes.formats.foreign import (
    SECRET_SCRIPT,
    Foreign,
    Note,
    environment,
    hides,
    model_name,
    note,
    note_unread,
    parallel,
    slug,
    unshared,
)
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.load import RecipeError
from stoker.recipes.recipe import Recipe, Step

NAME = "vllm-recipes"


@dataclass(frozen=True)
class Hardware:
    """A profile of that project's taxonomy."""

    generation: str
    cards: int
    memory_gb: int  # of all its cards

    @property
    def brand(self) -> str:
        return "amd" if self.generation == "amd" else "nvidia"


HARDWARE = {
    "h100": Hardware("hopper", 8, 640),
    "h200": Hardware("hopper", 8, 1128),
    "b200": Hardware("blackwell", 8, 1440),
    "gb200": Hardware("blackwell", 4, 768),
    "b300": Hardware("blackwell", 8, 2144),
    "gb300": Hardware("blackwell", 4, 1152),
    "dgx_station_gb300": Hardware("blackwell", 1, 252),
    "dgx_spark_gb10": Hardware("blackwell", 1, 128),
    "rtx_pro_6000": Hardware("blackwell", 1, 96),
    "rtx_pro_6000_2x": Hardware("blackwell", 2, 192),
    "rtx_pro_6000_8x": Hardware("blackwell", 8, 768),
    "rtx_pro_5000": Hardware("blackwell", 1, 72),
    "rtx_pro_5000_4x": Hardware("blackwell", 4, 288),
    "rtx_5090": Hardware("blackwell", 1, 32),
    "rtx_5090_2x": Hardware("blackwell", 2, 64),
    "rtx_4090_2x": Hardware("ada", 2, 48),
    "mi300x": Hardware("amd", 8, 1536),
    "mi325x": Hardware("amd", 8, 2048),
    "mi355x": Hardware("amd", 8, 2304),
}
ONE, SEVERAL, STAGED, EXPERTS = "single_node_tp", "multi_node_tp", "multi_node_tp_pp", "multi_node_tep"
KNOWN = {
    "guide": "documentation",
    "kv_offload_support": "a choice of that project's page",
    "strategy_hardware": "a choice of that project's page",
    "default_strategy": "stoker up serves with tensor parallel",
    "hardware_opt_in_features": "choose features with --feature",
    "hardware_notes": "documentation",
}
META = "a description, which nothing reads"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser")


@dataclass(frozen=True)
class Choice:
    """What the user picks of a recipe that offers several ways."""

    variant: str = "default"
    hardware: str = ""
    features: tuple[str, ...] = ()  # NAME or NAME=MODE, beside those that are on
    without: tuple[str, ...] = ()


def read(table: Table, stem: str, choice: Choice, boxes: int = 1) -> Foreign:
    """`boxes`: how many the user names."""
    if "omni" in table:
        raise table.error("omni", "it is served by vLLM-Omni and not by `vllm serve`.")
    return _Reader(table, stem, choice, boxes).foreign


class _Reader:
    def __init__(self, table: Table, stem: str, choice: Choice, boxes: int) -> None:
        self.table, self.choice, self.boxes = table, choice, boxes
        self.meta, self.model = table.table("meta"), table.table("model")
        self.variants = table.table("variants")
        self.variant = self._variant()
        self.hardware = self._hardware()
        self.foreign = foreign = self._head(stem)
        strategies = table.texts("compatible_strategies")
        self.strategy = self._strategy(strategies)
        overrides = table.table("strategy_overrides")
        self.here = overrides.table(self.strategy)
        note_unread(foreign, overrides, {}, "strategy_overrides.")
        self._arguments()
        self._dependencies()
        self._image()
        self._notes()

    def _variant(self) -> Table:
        if self.choice.variant not in self.variants:
            if self.choice.variant == "default":
                return Table(self.table.source, {}, ("variants", "default"))
            offered = ", ".join(self.variants) or "none"
            raise self.table.error("variants", f"no variant {self.choice.variant!r}; it has: {offered}.")
        return self.variants.table(self.choice.variant)

    def _hardware(self) -> Hardware | None:
        wanted = self.choice.hardware
        known = HARDWARE.get(wanted)
        allowed = self.variant.texts("supported_hardware")
        if wanted and allowed and wanted not in allowed:
            raise self.variant.error(
                "supported_hardware", f"this variant is for {', '.join(allowed)}, not for {wanted}."
            )
        if self.meta.table("hardware").values.get(wanted) == "unsupported":
            raise self.table.source.error(
                ("meta", "hardware", wanted), f"the recipe says that it does not run on {wanted}."
            )
        if wanted and not known and wanted not in self.offered_hardware():
            raise RecipeError(
                f"unknown hardware {wanted!r}; known: {', '.join(sorted({*HARDWARE, *self.offered_hardware()}))}."
            )
        return known

    def offered_hardware(self) -> list[str]:
        """The profiles that the recipe names."""
        places = [self.meta.table("hardware"), self.variant.table("hardware_overrides")]
        return sorted({key for place in places for key in place})

    def _head(self, stem: str) -> Foreign:
        base = self.meta.text("slug") or stem
        title = self.meta.text("title") or self.model.text("model_id") or stem
        parts = [part for part in (self.choice.variant, self.choice.hardware) if part not in ("", "default")]
        name = slug("-".join([base, *(part.replace("_", "-") for part in parts)]))
        if parts:
            title = f"{title} ({', '.join(parts)})"
        model = self.variant.text("model_id") or self.model.text("model_id")
        self.model.take("model_id")
        place = "model.model_id"
        foreign = Foreign(NAME, name, title, model, place, card_per_box=False)
        least = self.variant.text("min_vllm_version") or self.model.text("min_vllm_version")
        self.model.take("min_vllm_version")
        foreign.engine_version = f">={least}" if least else ""
        foreign.cards = self.hardware.cards if self.hardware else 1
        return foreign

    def _strategy(self, offered: list[str]) -> str:
        """Tensor parallel on one box or several; a recipe for several boxes only says so."""
        least = self.table.take("strategy_min_gpus")
        several = [name for name in (SEVERAL, STAGED, EXPERTS) if name in offered]
        needed = 1
        for name in several[:1]:
            needed = max(needed, -(-self._least_cards(least, name) // self.foreign.cards))
        if self.boxes > 1 or (several and ONE not in offered and not any(n.startswith("single") for n in offered)):
            if not several:
                raise self.table.error("compatible_strategies", f"it is for one box only: {', '.join(offered)}.")
            self.foreign.boxes = max(2, needed) if self.boxes < 2 else self.boxes
            return several[0]
        if several or ONE in offered or not offered:
            return ONE
        note(self.foreign, "compatible_strategies", offered, "stoker up serves with tensor parallel")
        return ONE

    def _least_cards(self, least: Any, strategy: str) -> int:
        if isinstance(least, dict):
            least = least.get(strategy, 1)
        if isinstance(least, bool) or not isinstance(least, int) or not 1 <= least <= 4096:
            if least is not None:
                raise self.table.error("strategy_min_gpus", "expected a number of cards, or a table of them.")
            return 1
        return least

    def _arguments(self) -> None:
        """In that project's order, where of two equal options the last counts."""
        foreign, here = self.foreign, self.here
        arguments = self.model.texts("base_args") + self.variant.texts("extra_args")
        env = self.model.environment("base_env") | self.variant.environment("extra_env")
        layers = [self._exact(self.variant)]
        general = self._general(here)
        layers += [general] if general else [self._general(self.table), self._general(self.variant)]
        layers.append(self._exact(here))
        arguments += here.texts("extra_args") + here.texts("vllm_args")
        env |= here.environment("env") | here.environment("extra_env")
        for layer in layers:
            if layer:
                arguments += layer.texts("extra_args")
                env |= layer.environment("extra_env")
                if "docker_image" in layer:
                    foreign.image = layer.text("docker_image")
                note_unread(foreign, layer, {}, f"hardware_overrides.{layer.place[-1]}.")
        arguments += self._spread()
        arguments += self._features()
        foreign.arguments = arguments
        environment(foreign, env)
        here.take("tp"), here.take("hardware_overrides")
        note_unread(foreign, here, {}, f"strategy_overrides.{self.strategy}.")

    def _exact(self, table: Table) -> Table | None:
        overrides = table.table("hardware_overrides")
        return overrides.table(self.choice.hardware) if self.choice.hardware in overrides else None

    def _general(self, table: Table) -> Table | None:
        """Changes for the generation of the hardware, or for its maker."""
        overrides = table.table("hardware_overrides")
        if self.hardware:
            for key in (self.hardware.generation, self.hardware.brand):
                if key in overrides:
                    return overrides.table(key)
        return None

    def _spread(self) -> list[str]:
        if self.strategy == ONE:
            tensor = self._declared(self.variant) or self._declared(self.here) or self._fitting()
            if self.foreign.cards > 1:
                tensor = min(tensor, self.foreign.cards)
            return ["--tensor-parallel-size", str(tensor)] if tensor > 1 else []
        cards, boxes = self.foreign.cards, self.foreign.boxes
        if self.strategy == STAGED:
            return ["--tensor-parallel-size", str(cards), "--pipeline-parallel-size", str(boxes)]
        experts = ["--enable-expert-parallel"] if self.strategy == EXPERTS else []
        return ["--tensor-parallel-size", str(cards * boxes), *experts]

    def _declared(self, table: Table) -> int:
        """`tp`, a number or a table of them by hardware."""
        value = table.take("tp")
        if isinstance(value, dict):
            keys = (
                self.choice.hardware,
                *((self.hardware.generation, self.hardware.brand) if self.hardware else ()),
                "default",
            )
            value = next((value[key] for key in keys if key in value), None)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096:
            raise table.error("tp", "expected a number of cards, or a table of them.")
        return value

    def _fitting(self) -> int:
        """One card where the weights fit on it, else all of the box."""
        least = self.variant.take("vram_minimum_gb")
        if not self.hardware or not isinstance(least, int | float):
            return self.hardware.cards if self.hardware else 1
        return 1 if least <= self.hardware.memory_gb / self.hardware.cards else self.hardware.cards

    def _features(self) -> list[str]:
        features = self.table.table("features")
        off = {*self.table.texts("opt_in_features"), *self.choice.without}
        modes = dict(_mode(text) for text in self.choice.features)
        by_variant = self.variant.table("default_modes")
        for name in (*modes, *self.choice.without):
            if name not in features:
                raise self.table.error("features", f"no feature {name!r}; it has: {', '.join(features) or 'none'}.")
        arguments: list[str] = []
        for name in features:
            feature = features.table(name)
            feature.take("description"), feature.take("label"), feature.take("hardware_overrides")
            strategies = feature.texts("strategies")
            if (name in off and name not in modes and name not in by_variant) or (
                strategies and self.strategy not in strategies
            ):
                note(self.foreign, f"features.{name}", "off", f"choose it with --feature {name}")
                continue
            if "modes" in feature:
                arguments += self._mode_arguments(name, feature, modes.get(name, ""), by_variant.text(name))
            else:
                override = self._general(feature)
                arguments += (override if override and "args" in override else feature).texts("args")
                feature.take("args")
            note_unread(self.foreign, feature, {}, f"features.{name}.")
        return arguments

    def _mode_arguments(self, name: str, feature: Table, wanted: str, usual: str) -> list[str]:
        modes = feature.table("modes")
        allowed = [
            key for key in modes if self.choice.variant in (modes.table(key).texts("variants") or [self.choice.variant])
        ]
        default = feature.text("default_mode")
        if wanted and wanted not in allowed:
            raise feature.error("modes", f"no mode {wanted!r} for this variant; it has: {', '.join(allowed)}.")
        chosen = next((key for key in (wanted, usual, default, *allowed) if key in allowed), "")
        if not chosen:
            note(self.foreign, f"features.{name}", "off", "none of its modes is for this variant")
            return []
        others = [key for key in allowed if key != chosen]
        if others:
            note(self.foreign, f"features.{name}.modes", ", ".join(others), f"choose one with --feature {name}=MODE")
        mode = modes.table(chosen)
        for override in (self._exact(mode), self._general(mode)):
            if override and "args" in override:
                return override.texts("args")
        return mode.texts("args")

    def _dependencies(self) -> None:
        for number, value in enumerate(self.table.items("dependencies")):
            place = ("dependencies", number)
            if not isinstance(value, dict):
                raise self.table.source.error(place, "expected a table with a command.")
            entry = Table(self.table.source, value, place)
            command, optional, said = entry.text("command").strip(), entry.flag("optional"), entry.text("note")
            if optional or not command:
                why = "it is optional: add it as [[shell]] if you want it" if optional else "it has no command"
                note(self.foreign, f"dependencies[{number}]", command or said, why)
            elif hides(command):
                note(self.foreign, f"dependencies[{number}]", command, SECRET_SCRIPT)
            else:
                self.foreign.shell.append(Step(command, note=said))
            note_unread(self.foreign, entry, {}, f"dependencies[{number}].")

    def _image(self) -> None:
        images = [table.take("docker_image") for table in (self.variant, self.model)]
        for image in images if not self.foreign.image else []:
            if isinstance(image, Mapping):
                brand = self.hardware.brand if self.hardware else "nvidia"
                image = image.get(brand, image if brand == "nvidia" else None)
                if isinstance(image, Mapping):
                    image = image.get("cu130") or image.get("cu129")
            if isinstance(image, str):
                self.foreign.image = image
                return

    def _notes(self) -> None:
        foreign = self.foreign
        others = [name for name in self.variants if name != self.choice.variant]
        if others:
            note(foreign, "variants", ", ".join(others), "choose one with --variant")
        if not self.choice.hardware:
            named = sorted({*self.offered_hardware(), *self.table.table("hardware_overrides")})
            if named:
                note(foreign, "hardware", ", ".join(named), "what it says about these needs --hardware")
        self.table.take("hardware_overrides"), self.variant.take("hardware_overrides")
        for key in ("precision", "vram_minimum_gb", "description", "label", "precision_hardware"):
            self.variant.take(key)
        for key in self.meta:
            if key not in ("title", "slug", "hardware"):
                note(foreign, f"meta.{key}", self.meta.values[key], META)
        described = ("architecture", "parameter_count", "active_parameters", "context_length", "supports_dcp")
        for key in described:
            self.model.take(key)
        install = {"install": "how to install vLLM: stoker up uses the one that is installed, or a container"}
        note_unread(foreign, self.model, install, "model.")
        note_unread(foreign, self.variant, {}, f"variants.{self.choice.variant}.")
        note_unread(foreign, self.table, KNOWN)


def _mode(text: str) -> tuple[str, str]:
    name, _, mode = text.partition("=")
    return name, mode


def write_recipe(recipe: Recipe) -> tuple[dict[str, Any], list[Note]]:
    notes = unshared(recipe)
    spread, arguments = parallel(recipe, write(recipe))
    serve = recipe.serve
    tools = [one for one in arguments if serve.tool_parser and one.flag in TOOLS]
    reasoning = [one for one in arguments if serve.reasoning_parser and one.flag == "--reasoning-parser"]
    drafting = [one for one in arguments if serve.draft != "none" and one.flag == "--speculative-config"]
    base = [one for one in arguments if one not in (*tools, *reasoning, *drafting)]
    if recipe.model.revision != "main":
        base.insert(0, Option("", [], ["--revision", recipe.model.revision]))
    model, image = model_name(recipe), recipe.container.image if recipe.container else ""
    least = recipe.engine_version.removeprefix(">=").strip()
    exact = recipe.engine_version in ("", f">={least}")
    if not exact:
        notes.append(Note("engine_version", "that format says only from which version on"))
    tags = {
        "title": recipe.title,
        "slug": recipe.name,
        "provider": model.partition("/")[0],
        "description": recipe.title,
    }
    found: dict[str, Any] = {
        "meta": {**tags, "tasks": ["text"]},
        "model": {
            "model_id": model,
            **({"min_vllm_version": least} if exact and least else {}),
            **({"docker_image": image} if image else {}),
            "base_args": _written(base),
            "base_env": dict(recipe.env),
        },
    }
    steps = [step for step in recipe.shell if step.when == "before" and not step.inside]
    if steps:
        found["dependencies"] = [{**({"note": step.note} if step.note else {}), "command": step.run} for step in steps]
    notes += [Note(f"shell: {step.run}", "that format has only commands before the start, outside of a container")
              for step in recipe.shell if step not in steps]  # fmt: skip
    features = {
        "tool_calling": ("Tool calls are read from the answer", tools),
        "reasoning": ("Reasoning is told apart from the answer", reasoning),
        "spec_decoding": ("Speculative decoding", drafting),
    }
    found["features"] = {
        name: {"description": said, "args": _written(options)} for name, (said, options) in features.items() if options
    }
    found |= {"opt_in_features": [], "variants": {"default": {"description": recipe.title}}}
    strategy, said = _strategy(spread.boxes, spread.tensor, spread.pipeline, spread.expert)
    found["compatible_strategies"] = [strategy]
    if strategy == ONE:
        extra = {"extra_args": said} if said else {}
        found["strategy_overrides"] = {ONE: {"tp": spread.tensor, **extra}}
    else:
        found["strategy_min_gpus"] = {strategy: spread.boxes}
        if said:
            notes.append(Note("nodes", said[0]))
    if spread.ray:
        notes.append(Note("nodes.launcher", "that format has no Ray"))
    notes.append(
        Note("meta", "its difficulty, dates and tested hardware, and each variant's precision, are for you to fill in")
    )
    return found, notes


def _strategy(boxes: int, tensor: int, pipeline: int, expert: bool) -> tuple[str, list[str]]:
    """The way to serve, and what it does not say: arguments on one box, a sentence on several."""
    if boxes == 1:
        arguments = ["--pipeline-parallel-size", str(pipeline)] if pipeline > 1 else []
        return ONE, arguments + (["--enable-expert-parallel"] if expert else [])
    if (tensor, pipeline) == (boxes, 1):
        return (EXPERTS if expert else SEVERAL), []
    if (tensor, pipeline, expert) == (1, boxes, False):
        return STAGED, []
    return SEVERAL, [f"tensor parallel {tensor} and pipeline parallel {pipeline} become tensor parallel over all cards"]


def _written(options: list[Option]) -> list[str]:
    return [token for one in options for token in one.written]
