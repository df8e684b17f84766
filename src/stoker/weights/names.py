"""Which tensors of a checkpoint fill which parameter of the model. No torch.

Published files differ in prefix (multimodal or text-only) and in how experts are stored (fused, or one by one, or
fused in the trunk and one by one in the MTP head). Whatever is left over is explained by a rule here or is an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stoker.errors import CheckpointError
from stoker.weights.checkpoint import Checkpoint

TRUNK_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."
EXPERTS = ".mlp.experts."

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint and the part of the parameter it fills."""

    tensor: str
    index: Index
    shape: tuple[int, ...]


def map_parameters(
    parameters: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, tied_head: bool
) -> tuple[dict[str, list[Piece]], list[str]]:
    """Pieces per parameter of a trunk (with or without `mtp.`), and a note per rule that left tensors unused."""
    prefix = _trunk_prefix(checkpoint)
    pieces = {}
    for name, shape in parameters.items():
        if name == "lm_head.weight":
            target = next((head for head in HEAD_NAMES if head in checkpoint.tensors), name)
        else:
            target = name if name.startswith(MTP_PREFIX) else prefix + name
        pieces[name] = _pieces(target, shape, checkpoint)
    has_mtp = any(name.startswith(MTP_PREFIX) for name in parameters)
    rules = {
        "vision tensors not used: Stoker computes text only": VISION_PREFIXES,
        "rotary tables not used: they are computed": tuple(
            name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")
        ),
    }
    if not has_mtp:
        rules["MTP tensors not used: the config has no MTP head"] = (MTP_PREFIX,)
    if tied_head:
        rules["head tensor not used: the config ties it to the embedding"] = HEAD_NAMES
    used = (piece.tensor for parts in pieces.values() for piece in parts)
    return pieces, _account_for(checkpoint, used, rules)


def map_drafter(parameters: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> dict[str, list[Piece]]:
    """Pieces per parameter of a DFlash drafter, whose tensors carry no prefix."""
    pieces = {name: _pieces(name, shape, checkpoint) for name, shape in parameters.items()}
    _account_for(checkpoint, (part.tensor for parts in pieces.values() for part in parts), {})
    return pieces


def _trunk_prefix(checkpoint: Checkpoint) -> str:
    for prefix in TRUNK_PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.tensors:
            return prefix
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in TRUNK_PREFIXES)
    raise CheckpointError(f"{checkpoint.directory} has no embedding (looked for {tried}).")


def _pieces(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> list[Piece]:
    if EXPERTS in name and name not in checkpoint.tensors:
        pieces = _per_expert(name, shape)
        if pieces[0].tensor not in checkpoint.tensors:  # neither layout: name the fused one in the error
            pieces = [Piece(name, (), shape)]
    else:
        pieces = [Piece(name, (), shape)]
    for piece in pieces:
        info = checkpoint.tensors.get(piece.tensor)
        if info is None:
            raise CheckpointError(_missing(piece, checkpoint))
        if info.shape != piece.shape:
            raise CheckpointError(
                f"{info.file}: {piece.tensor} has shape {list(info.shape)}, config.json asks for {list(piece.shape)}."
            )
    return pieces


def _per_expert(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """experts.gate_up_proj [E, 2I, H] from experts.E.gate_proj and up_proj [I, H]; down_proj likewise."""
    stem, kind = name.rsplit(".", 1)
    count, rows, columns = shape
    if kind == "down_proj":
        return [Piece(f"{stem}.{e}.down_proj.weight", (e,), (rows, columns)) for e in range(count)]
    half = rows // 2
    return [
        Piece(f"{stem}.{e}.{part}.weight", (e, place), (half, columns))
        for e in range(count)
        for part, place in (("gate_proj", slice(0, half)), ("up_proj", slice(half, rows)))
    ]


def _missing(piece: Piece, checkpoint: Checkpoint) -> str:
    found = f"{checkpoint.directory} lacks the tensor {piece.tensor} (expected shape {list(piece.shape)})"
    stem = piece.tensor.removesuffix(".weight")
    packed = [f"{stem}.{suffix}" for suffix in ("qweight", "weight_packed") if f"{stem}.{suffix}" in checkpoint.tensors]
    if packed:
        return f"{found}: it is stored quantised as {packed[0]}, and Stoker reads only 16- and 32-bit weights so far."
    if piece.tensor.startswith(MTP_PREFIX):
        have = len(checkpoint.names(MTP_PREFIX))
        return (
            f"{found}: the MTP head is incomplete, only {have} of its tensors are there. "
            "Fetch the missing file, or remove all mtp.* tensors to run without drafting."
        )
    return f"{found}; fetch the missing file."


def _account_for(checkpoint: Checkpoint, used: Iterable[str], rules: Mapping[str, tuple[str, ...]]) -> list[str]:
    left = dict.fromkeys(checkpoint.tensors)
    for name in used:
        left.pop(name, None)
    notes = []
    for rule, prefixes in rules.items():
        explained = [name for name in left if prefixes and name.startswith(prefixes)]
        for name in explained:
            del left[name]
        if explained:
            notes.append(f"{len(explained)} {rule}.")
    if left:
        name = next(iter(left))
        info = checkpoint.tensors[name]
        raise CheckpointError(
            f"{info.file}: {name} {list(info.shape)} in {info.dtype} has no place in this model "
            f"({len(left)} such tensors); is config.json the right one?"
        )
    return notes
