"""The library's Transformer in PyTorch, with the same names for the same parameters, and its
training step.

`benchmarks.torch_step` and `benchmarks.gpu` compare with it. It is written as one writes it for
speed in PyTorch: its own scaled dot-product attention, which knows that half of the weights are
masked, and its fused AdamW. Only this file and `torch_gpu` need PyTorch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ml_collections import ConfigDict
from torch import nn

from course_lib.measure import hardware


class MLPBlock(nn.Module):
    """`course_lib.models.layers.mlp`."""

    def __init__(self, config: ConfigDict):
        super().__init__()
        width, hidden = config.hidden_size, config.mlp_expansion * config.hidden_size
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.input_layer, self.output_layer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transforms each position [B L D] by itself."""
        x = F.gelu(self.input_layer(self.pre_norm(x)), approximate="tanh")
        return self.dropout(self.output_layer(x))


class AttentionBlock(nn.Module):
    """`course_lib.models.layers.attention`."""

    def __init__(self, config: ConfigDict):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_heads
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.qkv, self.output_layer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Lets each position [B L D] read from those before it."""
        products = self.qkv(self.pre_norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        x = F.scaled_dot_product_attention(*products.chunk(3, dim=-1), is_causal=True)
        return self.dropout(self.output_layer(x.transpose(1, 2).flatten(2)))


class Transformer(nn.Module):
    """`course_lib.models.transformer.Transformer`, for the options of "cpu" and "155m"."""

    def __init__(self, config: ConfigDict):
        super().__init__()
        self.num_layers = config.num_layers
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pos_emb = nn.Embedding(config.max_seq_len, config.hidden_size)
        for layer in range(config.num_layers):
            self.add_module(
                f"block_{layer}",
                nn.ModuleDict({"mlp": MLPBlock(config), "attn": AttentionBlock(config)}),
            )
        self.post_norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.output_layer = nn.Linear(config.hidden_size, config.num_outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits [B L V]."""
        x = self.embed(tokens) + self.pos_emb.weight[: tokens.shape[1]]
        for layer in range(self.num_layers):
            block = self.get_submodule(f"block_{layer}")
            x = x + block["mlp"](x)
            x = x + block["attn"](x)
        return self.output_layer(self.post_norm(x))


def _jax_name(module: nn.Module, kind: str) -> str:
    names = {nn.Linear: "kernel", nn.LayerNorm: "scale", nn.Embedding: "embedding"}
    return names[type(module)] if kind == "weight" else kind


class Trainer:
    """A model, its optimizer, and a batch to train it on."""

    def __init__(
        self,
        config: ConfigDict,  # a whole one
        params: Mapping[str, np.ndarray],  # by the library's names: "block_0/mlp/..."
        tokens: np.ndarray,  # [B, L + 1]
        rates: Iterable[float],  # the learning rate of each step
        compiled: bool,  # whether `torch.compile` compiles model and loss
        device: str = "cpu",
        dtype: torch.dtype | None = None,  # of products (autocast); None: float32
    ):
        torch.set_num_threads(hardware.cores())
        torch.manual_seed(config.seed)
        self.device, self.dtype = device, dtype
        self.apart = 0.0  # from the library's logits, as far as it was compared
        self.model, optimizer = Transformer(config.model).to(device), config.optimizer
        with torch.no_grad():
            for name, kind, module, parameter in self._parameters():
                value = torch.from_numpy(np.array(params[name]))
                if kind == "weight" and isinstance(module, nn.Linear):  # [outputs inputs] here
                    parameter.copy_(value.reshape(parameter.shape[::-1]).T)
                else:
                    parameter.copy_(value.reshape(parameter.shape))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=0.0,
            betas=(optimizer.b1, optimizer.b2),
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.clip_norm, self.rates = optimizer.clip_norm, iter(rates)
        batch = torch.from_numpy(tokens).long().to(device)
        self.inputs, self.labels = batch[:, :-1], batch[:, 1:]
        self.loss = torch.compile(self.eager_loss) if compiled else self.eager_loss

    def _parameters(self) -> list[tuple[str, str, nn.Module, nn.Parameter]]:
        """Returns (its name in the library, "weight" or "bias", its layer, the parameter)."""
        return [
            (f"{path}.{_jax_name(module, kind)}".replace(".", "/"), kind, module, parameter)
            for path, module in self.model.named_modules()
            for kind, parameter in module.named_parameters(recurse=False)
        ]

    def eager_loss(
        self, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns loss and accuracy, as the library's step does; not compiled."""
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
            logits, labels = self.model(inputs).flatten(0, 1), labels.flatten()
            right = (logits.argmax(dim=-1) == labels).float().mean()
            return F.cross_entropy(logits, labels), right

    def _backward(self) -> torch.Tensor:
        loss, _ = self.loss(self.inputs, self.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    def step(self) -> Any:
        """Trains for a step and returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = next(self.rates)
        loss = self._backward()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return loss

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns gradients by the library's names, each flattened in the library's order."""
        self._backward()
        found = {}
        for name, kind, module, parameter in self._parameters():
            turned = kind == "weight" and isinstance(module, nn.Linear)
            gradient = parameter.grad.T if turned else parameter.grad
            found[name] = gradient.cpu().numpy().flatten()
        return found

    def wait(self) -> None:
        """Returns when all steps are done. On a CPU they are when `step` returns."""
        if self.device == "cuda":
            torch.cuda.synchronize()
