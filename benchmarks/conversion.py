"""What `modalities checkpoint convert` needs: memory beyond what the process has at its start, and time.

    python benchmarks/conversion.py [--megabytes 1000] [--folder DIR]

A checkpoint with AdamW's two moments is made and converted along each edge, each in a process of its own. Counted is
memory that no file holds (RssAnon and RssShmem), sampled every 5 ms, less what the process had before: pages of files that
are mapped count in the resident size, too, but belong to the disk's cache, and the kernel takes them back when it needs
memory. What torch imports on the way (about 27 MB for its fake tensors, where a file of torch.save is written) is in it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from modalities.checkpointing.conversion.converting import convert, target_of
from modalities.checkpointing.conversion.dcp_writing import write_dcp
from modalities.checkpointing.conversion.lazy_tensor import LazyTensor
from modalities.checkpointing.reading.sources import Form
from modalities.progress import TrainingProgress

NUM_LAYERS = 12
SAMPLED_EVERY_S = 0.005

EDGES = (
    ("dcp", "fsdp1", "fsdp1", None),
    ("fsdp1", "dcp again", "dcp", None),
    ("dcp", "model.bin", None, None),
    ("dcp", "model.safetensors", None, None),
    ("dcp", "shards", "safetensors", "bfloat16"),
    ("fsdp1", "from-fsdp1.safetensors", None, None),
    ("model.bin", "from-bin.safetensors", None, None),
    ("model.safetensors", "from-safetensors.bin", None, None),
    ("model.safetensors", "weights as dcp", "dcp", None),
    ("shards", "wide.safetensors", None, "float32"),
)


def make_checkpoint(folder: Path, megabytes: float) -> int:
    """A DCP folder of that size; gives the bytes of its largest tensor."""
    # weights and two moments: an embedding of 4 shares and layers of 1 share
    width = int((megabytes * 1e6 / (3 * 4) / (NUM_LAYERS + 4)) ** 0.5)
    shapes = {"embedding.weight": (4 * width, width)}
    shapes |= {f"layers.{index}.weight": (width, width) for index in range(NUM_LAYERS)}

    def lazy(key: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(key, Form.of(shape, torch.float32), lambda: torch.randn(shape))

    optimizer: dict[str, Any] = {}
    for name, shape in shapes.items():
        optimizer |= {f"state.{name}.{key}": lazy(name, shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizer |= {f"param_groups.{name}.lr": 0.1}
    model = {name: lazy(name, shape) for name, shape in shapes.items()}
    folder.mkdir()
    write_dcp(folder, {"app": {"model": model, "optimizer": optimizer}}, "run", TrainingProgress(1, 1, 1, 1))
    return 4 * width * width * 4


def anonymous_bytes() -> int:
    """Memory of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(source: Path, out: Path, to: str | None, dtype: str | None, connection: Any) -> None:
    """Convert once in this process; sends the peak of anonymous memory beyond the start's, and the seconds."""
    before, peak, ended = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(SAMPLED_EVERY_S):
            peak = max(peak, anonymous_bytes() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    wanted = getattr(torch, dtype) if dtype is not None else None
    done = convert(
        source, out, target_of(out, to), wanted, 150_000_000, lambda what, total: nullcontext(lambda n: None)
    )
    seconds = time.perf_counter() - started
    ended.set()
    sampler.join()
    num_bytes = sum(record.size for record in done.source_files.values())
    connection.send((peak, seconds, num_bytes, str(done.output)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        places = {"dcp": folder / "dcp"}
        largest = make_checkpoint(places["dcp"], arguments.megabytes)
        print(f"largest tensor {largest / 1e6:.0f} MB")
        print(f"{'route':<46} {'peak MB':>8} {'seconds':>8} {'MB/s':>6}")
        for source, name, to, dtype in EDGES:
            mine, theirs = context.Pipe()
            job = (places[source], folder / name, to, dtype, theirs)
            process = context.Process(target=measure, args=job)
            process.start()
            theirs.close()
            peak, seconds, num_bytes, output = mine.recv()
            process.join()
            places[name] = Path(output)
            route = f"{source} -> {name}{f' ({dtype})' if dtype else ''}"
            print(f"{route:<46} {peak / 1e6:8.0f} {seconds:8.1f} {num_bytes / 1e6 / seconds:6.0f}", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
