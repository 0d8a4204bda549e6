"""The step "one step for speed" of `benchmarks.gpu`, in PyTorch: the same model and sizes,
products in bfloat16, PyTorch's own flash attention and fused AdamW.

Its process needs JAX on the CPU, for the initial parameters: JAX_PLATFORMS=cpu.
"""

import importlib.metadata
import time
from typing import Any

import jax
import numpy as np
import torch

from benchmarks import gpu_cases, torch_model, torch_step
from course_lib import configs, training
from course_lib.text.data import Batch

CHECKED = 2  # sequences whose loss the library computes, too


def trainer(compiled: bool, device: str = "cuda") -> torch_model.Trainer:
    """Returns a trainer that has taken two steps, after its first loss was compared with the
    library's.

    Raises:
      RuntimeError: if the losses are more than 0.5% apart: it is another model.
    """
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, which is XLA's choice, too
    config = configs.get("155m")
    config.update_from_flattened_dict(gpu_cases.LIKE_PYTORCH | {"model.attention": "xla"})
    run = training.build(config)
    params = run.init(jax.random.key(config.seed)).params
    shape = config.data.batch_size, config.data.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    trainer = torch_model.Trainer(
        config,
        torch_step.by_name(params),
        tokens,
        [config.optimizer.learning_rate] * 1_000,
        compiled,
        device,
        torch.bfloat16,
    )
    few = tokens[:CHECKED]
    batch = Batch(few[:, :-1], few[:, 1:], np.ones(few[:, 1:].shape, np.float32))
    ours = float(jax.jit(run.loss_fn)(params, batch, None)[0])
    with torch.no_grad():
        # not compiled: for the whole batch it would then be compiled again, for any size
        theirs, _ = trainer.eager_loss(trainer.inputs[:CHECKED], trainer.labels[:CHECKED])
    if not abs(float(theirs) / ours - 1) < 0.005:
        raise RuntimeError(f"not the same model: losses {ours} and {float(theirs)}")
    for _ in range(2):
        trainer.step()
    trainer.wait()
    return trainer


def row(trainer: torch_model.Trainer, steps: int) -> dict[str, Any]:
    """Returns the row of `benchmarks.gpu` for a trainer."""
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        trainer.wait()
        taken.append(time.perf_counter() - start)
    low, median, high = np.percentile(taken, [25, 50, 75])
    return {
        "not_run": None,
        "seconds": {"median": median, "low": low, "high": high},
        "measured_peak_bytes": (
            torch.cuda.max_memory_allocated() if trainer.device == "cuda" else None
        ),
        "tokens": trainer.labels.numel(),
        "torch": importlib.metadata.version("torch"),
    }
