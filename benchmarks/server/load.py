"""How fast a checkpoint is read: raw direct reads (the ceiling), Stoker's loader, and safetensors' mmap.

Makes a synthetic checkpoint shaped like a 120B-class INT4 mixture of experts, then takes turns between the ways of
reading it, each with the page cache dropped before. A cache below the machine (a hypervisor's, a controller's) stays.
"""

import argparse
import json
import os
import platform
import random
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from math import prod
from mmap import PAGESIZE
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from stoker.weights.checkpoint import Checkpoint
from stoker.weights.direct import Pool
from stoker.weights.headers import ITEM_SIZES, TensorInfo
from stoker.weights.reader import DTYPES, REQUEST, read_tensors

HIDDEN, EXPERT, GROUP = 3072, 1024, 128
SHARD = 10**9  # bytes
EMBEDDING_SHARE = 0.02  # of all bytes, as in the real one: 1.5 of 76 GB
READERS = (1, 2, 4, 8)
Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def layer_entries(layer: int) -> Iterator[Entry]:
    """One layer: two BF16 matrices of 50 MB, two of 3 MB, and 256 experts of three INT4 weights of 1.5 MB each."""
    stem = f"model.layers.{layer}"
    for name, rows in (("q_proj", 8192), ("o_proj", 8192), ("k_proj", 512), ("v_proj", 512)):
        yield f"{stem}.self_attn.{name}.weight", "BF16", (rows, HIDDEN)
    for expert in range(256):
        for name, inputs, outputs in (
            ("gate_proj", HIDDEN, EXPERT),
            ("up_proj", HIDDEN, EXPERT),
            ("down_proj", EXPERT, HIDDEN),
        ):
            weight = f"{stem}.mlp.experts.{expert}.{name}"
            yield f"{weight}.qweight", "I32", (inputs // 8, outputs)
            yield f"{weight}.qzeros", "I32", (inputs // GROUP, outputs // 8)
            yield f"{weight}.scales", "F16", (inputs // GROUP, outputs)


def size(entry: Entry) -> int:
    return ITEM_SIZES[entry[1]] * prod(entry[2])


def make_checkpoint(directory: Path, total: int) -> None:
    rows = int(total * EMBEDDING_SHARE) // (2 * HIDDEN)
    shard: list[Entry] = [("model.embed_tokens.weight", "BF16", (rows, HIDDEN))]
    written = layer = number = 0
    while written < total:
        shard.extend(layer_entries(layer))
        layer += 1
        have = sum(map(size, shard))
        if have >= SHARD or written + have >= total:
            write_shard(directory / f"model-{number:05}.safetensors", shard)
            written, number, shard = written + have, number + 1, []


def write_shard(path: Path, entries: list[Entry]) -> None:
    header, end = {}, 0
    for entry in entries:
        name, dtype, shape = entry
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size(entry)]}
        end += size(entry)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = os.urandom(16 << 20)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at in range(0, end, len(noise)):
            file.write(noise[: end - at])
        file.flush()
        os.fsync(file.fileno())


def drop_cache(files: list[Path]) -> str:
    """Empty the page cache, or at least drop these files from it; says which."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "drop_caches before each reading"
    except OSError:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "posix_fadvise(DONTNEED) on every file before each reading"


def read_raw(files: list[Path], readers: int, memory: memoryview | None = None) -> None:
    """Every byte of every file with O_DIRECT: each reader into one buffer over and over, or each byte to its place."""
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    pieces = [(fd, at) for fd, path in zip(descriptors, files, strict=True) for at in pieces_of(path)]
    places = iter(enumerate(pieces))
    lock = threading.Lock()

    def reader() -> None:
        buffer = memoryview(Pool(0).take(REQUEST).buffer)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            number, (descriptor, offset) = place
            target = memory[number * REQUEST : (number + 1) * REQUEST] if memory else buffer
            os.preadv(descriptor, [target], offset)

    threads = [threading.Thread(target=reader) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors:
        os.close(descriptor)


def pieces_of(path: Path) -> range:
    return range(0, path.stat().st_size, REQUEST)


def read_stoker(infos: list[TensorInfo], model: dict[str, Tensor] | None) -> None:
    for _ in read_tensors(infos, into=(lambda info: model[info.name]) if model else None):
        pass


def read_mmap(files: list[Path], model: dict[str, Tensor] | None) -> None:
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_tensor(name)
                _ = model[name].copy_(tensor) if model else tensor.clone()


def measure(directory: Path, rounds: int, with_model: bool) -> dict[str, object]:
    checkpoint = Checkpoint.open(directory)
    infos = list(checkpoint.tensors.values())
    files = sorted({info.file for info in infos})
    total = sum(info.nbytes for info in infos)
    ways: dict[str, Callable[[], None]] = {
        f"raw, {readers} readers": lambda readers=readers: read_raw(files, readers)  # type: ignore[misc]
        for readers in READERS
    }
    ways["stoker, temporary tensors"] = lambda: read_stoker(infos, None)
    ways["mmap, temporary tensors"] = lambda: read_mmap(files, None)
    if with_model:  # zeros: memory touched before, so that both are timed on reading and not on the first page faults
        size = REQUEST * sum(len(pieces_of(file)) for file in files)
        memory = memoryview(Pool(0).take(size).buffer).cast("B")
        for page in range(0, size, PAGESIZE):
            memory[page] = 1
        ways["raw, 4 readers, all memory"] = lambda: read_raw(files, 4, memory)
        model = {info.name: torch.zeros(info.shape, dtype=DTYPES[info.dtype]) for info in infos}
        ways["stoker, into the model"] = lambda: read_stoker(infos, model)
        ways["mmap, into the model"] = lambda: read_mmap(files, model)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):  # no way always follows the same other
            how = drop_cache(files)
            start = time.perf_counter()
            ways[way]()
            seconds[way].append(time.perf_counter() - start)
    speeds = {way: [total / second / 1e9 for second in taken] for way, taken in seconds.items()}
    ceiling = max(statistics.median(speeds[way]) for way in ways if way.endswith("readers"))
    rows = [
        {
            "way": way,
            "gb_per_s": round(statistics.median(speed), 2),
            "low": round(min(speed), 2),
            "high": round(max(speed), 2),
            "of_raw": round(statistics.median(speed) / ceiling, 3),
        }
        for way, speed in speeds.items()
    ]
    return {"bytes": total, "files": len(files), "tensors": len(infos), "cache": how, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="where to put the checkpoint, or a made one to reuse (default: /tmp)")
    parser.add_argument("--size-gb", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-model", action="store_true", help="leave out reading into model memory of the same size")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint for the next run")
    parser.add_argument("--machine", default="", help="what the machine is, in words, for the record")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    # mmap copies with torch: on 2 cores busy with other work, two threads of it were 7 times slower than one.
    torch.set_num_threads(1)
    directory = args.dir or Path(tempfile.mkdtemp(prefix="stoker-load-"))
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.glob("*.safetensors")):
        make_checkpoint(directory, int(args.size_gb * 1e9))
    try:
        result = measure(directory, args.rounds, not args.no_model)
    finally:
        if not args.keep:
            for path in directory.glob("model-*.safetensors"):
                path.unlink()
            if not any(directory.iterdir()):
                directory.rmdir()
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/server/load.py --size-gb {args.size_gb:g} --rounds {args.rounds}"
        + " --no-model" * args.no_model,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "safetensors")},
        "machine": args.machine or f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "rounds": args.rounds,
        **result,
    }
    print_table(report)
    text = json.dumps(report, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


def print_table(report: dict) -> None:
    print(f"{report['bytes'] / 1e9:.1f} GB, {report['tensors']} tensors in {report['files']} files; {report['cache']}.")
    print(f"Medians of {report['rounds']} rounds in turns; the best raw reading is the ceiling.\n")
    print(f"{'':28}{'GB/s':>6}{'low':>7}{'high':>7}{'of raw':>8}")
    for row in report["rows"]:
        print(f"{row['way']:28}{row['gb_per_s']:6.2f}{row['low']:7.2f}{row['high']:7.2f}{row['of_raw']:8.2f}")
    print()


if __name__ == "__main__":
    main()
