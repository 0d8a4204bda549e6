"""The step "one step for speed" of `benchmarks.gpu`, in PyTorch: the same model and sizes,
products in bfloat16, PyTorch's own flash attention and fused AdamW.

Its process needs JAX on the CPU, for the initial parameters: JAX_PLATFORMS=cpu.
"""

import importlib.metadata
import itertools
from typing import Any

import jax
import numpy as np
import torch

from benchmarks import gpu_cases, torch_model, torch_step
from course_lib import configs, measure, training

CHECKED = 2  # sequences whose logits the library computes, too
CLOSE = 0.02  # of the logits' norm; bfloat16 alone moves them by half of this


def trainer(compiled: bool, device: str = "cuda") -> torch_model.Trainer:
    """Returns a trainer whose first logits were compared with the library's.

    Raises:
      RuntimeError: if they are further apart than bfloat16 explains: it is another model.
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
        itertools.repeat(config.optimizer.learning_rate),
        compiled,
        device,
        torch.bfloat16,
    )
    ours = np.asarray(run.apply_fn(params, tokens[:CHECKED, :-1], None), np.float32)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        # not compiled: for the whole batch it would then be compiled again, for any size
        theirs = trainer.model(trainer.inputs[:CHECKED]).float().cpu().numpy()
    trainer.apart = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
    if not trainer.apart < CLOSE:
        raise RuntimeError(f"not the same model: logits are {trainer.apart:.3f} apart")
    return trainer


def row(trainer: torch_model.Trainer, steps: int) -> dict[str, Any]:
    """Returns the row of `benchmarks.gpu` for a trainer."""

    def step():
        trainer.step()
        trainer.wait()

    taken = measure.time(step, repeats=steps)
    return {
        "not_run": None,
        "seconds": {"median": taken.median, "low": taken.low, "high": taken.high},
        "measured_peak_bytes": (
            torch.cuda.max_memory_allocated() if trainer.device == "cuda" else None
        ),
        "tokens": trainer.labels.numel(),
        "logits_apart": trainer.apart,
        "torch": importlib.metadata.version("torch"),
    }
