"""What a run has learned: its parameters and its tokenizer, for another run, to sample and to
evaluate.

    run = trained.load("runs/books")
    print(trained.sample(run, "Once upon a time"))
    print(trained.evaluate(run, "other.txt"))
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from ml_collections import ConfigDict

from course_lib import fields, optimizers, training
from course_lib.measure import hardware
from course_lib.models import attention, parameters, sampling, transformer
from course_lib.program import hub, observe, settings
from course_lib.program.checkpoints import Checkpoints
from course_lib.text import data

PyTree = Any
Folder = str | os.PathLike[str]

# Fields of a model that another run may set otherwise: its parameters stay what they are.
MAY_DIFFER = {"dtype", "softmax_dtype", "dropout_rate"}
MAY_DIFFER |= {"capacity_factor", "dropless", "balance_weight"}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's newest undamaged checkpoint."""

    config: ConfigDict
    tokenizer: tokenizers.Tokenizer
    step: int
    params: PyTree  # on one device, the layers in the order of the model


def load(folder: Folder) -> Trained:
    """Reads a run's folder. Raises a ValueError if it is none, or has no checkpoint yet."""
    config = configuration(folder)
    try:
        step, params = _params(folder, config, _shapes(config))
    except ValueError as error:
        if "abstract_state" not in str(error):
            raise
        raise ValueError(
            f"{str(folder)!r} must be a run of this library's Transformer, not of a model of"
            f" your own: {error}"
        ) from None
    return Trained(config, tokenizer(folder), step, params)


def configuration(folder: Folder) -> ConfigDict:
    """Returns the configuration of a run."""
    try:
        text = (pathlib.Path(folder) / "config.json").read_text()
        return settings.complete(json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} must be the folder of a run: {error}") from None


def model(folder: Folder) -> dict[str, Any]:
    """Returns the fields of the model of a run, or of a folder of the Hub."""
    return hub.model(folder) if hub.holds(folder) else configuration(folder).model.to_dict()


def tokenizer(folder: Folder) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a run; older runs kept none, and used the course's."""
    path = pathlib.Path(folder) / "tokenizer.json"
    return data.tokenizer(str(path)) if path.exists() else data.tokenizer()


def check(config: ConfigDict, own: tokenizers.Tokenizer) -> None:
    """Refuses a run that begins with parameters of another model, or for other tokens."""
    folder = config.run.weights
    before, now = model(folder), config.model.to_dict()
    fixed = {name for name in before if settings.resumed(f"model.{name}") == fields.FIXED}
    fixed -= MAY_DIFFER | ({"max_seq_len"} if config.model.positions == "rotary" else set())
    one, other = ({"model": {name: m[name] for name in fixed}} for m in (before, now))
    unlike = fields.differences(one, other)
    path, of_hub = pathlib.Path(folder) / "tokenizer.json", hub.holds(folder)
    if of_hub and not path.exists():
        if config.run.tokenizer in ("course", "own"):
            unlike.append("run.tokenizer: give the tokenizer.json of this model")
    elif tokenizer(folder).to_str() != own.to_str():
        unlike.append(f"run.tokenizer: give {str(path)!r}")
    if unlike:
        raise ValueError(
            f"run.weights={folder!r} must be a run of this model: {'; '.join(unlike)}"
        )
    if of_hub:
        hub.load(folder, config.model, only_check=True)


def begin(state: training.TrainState, config: ConfigDict) -> training.TrainState:
    """Returns a run's first state, with the parameters of `config.run.weights`, a run or a
    folder of the Hub. Of many processes, all call it.
    """
    from course_lib.many_devices.pipeline_parallel import pipeline

    if hub.holds(folder := config.run.weights):
        params = jax.tree.map(
            lambda leaf, new: jax.make_array_from_callback(
                leaf.shape, leaf.sharding, new.__getitem__
            ),
            state.params,
            hub.load(folder, config.model),
        )
    else:
        before = configuration(folder)
        like = jax.tree.map(
            lambda leaf, saved: jax.ShapeDtypeStruct(
                leaf.shape, saved.dtype, sharding=leaf.sharding
            ),
            state.params,
            _shapes(before),
        )
        _, params = _params(folder, before, like)

    def ours(params: PyTree) -> PyTree:
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, state.params)
        return pipeline.to_stages(params, *_stages(config))

    placed = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    return dataclasses.replace(state, params=jax.jit(ours, out_shardings=placed)(params))


def _shapes(config: ConfigDict) -> PyTree:
    """Returns the shapes of a run's parameters, as it stores them."""

    def init(key: Any) -> PyTree:
        return optimizers.cast_params(config.optimizer, parameters.init(key, config.model))

    return jax.eval_shape(init, jax.random.key(0))


def _params(folder: Folder, config: ConfigDict, like: PyTree) -> tuple[int, PyTree]:
    """Returns step and parameters of the newest checkpoint, placed as `like`."""
    from course_lib.many_devices.pipeline_parallel import pipeline

    with contextlib.closing(Checkpoints(pathlib.Path(folder) / "checkpoints")) as checkpoints:
        saved = checkpoints.restore({"params": like})
    if saved is None:
        raise ValueError(f"{str(folder)!r} must have a checkpoint: it has none yet")
    return saved.step, pipeline.from_stages(saved.state["params"], *_stages(config))


def _stages(config: ConfigDict) -> tuple[int, int, str]:
    """Returns what the order of layers depends on, as `pipeline.to_stages` takes it."""
    return config.mesh.pipe, config.strategy.chunks, config.strategy.schedule


def _apply_fn(config: ConfigDict) -> Any:
    """Returns the model as a function, with an attention that this device can compute."""
    model = config.model.copy_and_resolve_references()
    here = hardware.recognize(jax.local_devices()[0])
    if attention.why_unavailable(model.attention, here, model.dtype):
        model.attention = "reference"
    return transformer.function(model)


def sample(
    run: Trained,
    prompt: str = "",
    *,
    length: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
) -> str:
    """Returns a prompt and its continuation, of `length` tokens or up to the end of a document.
    `temperature` as in `sampling.generate`.
    """
    end = data.end_of(run.tokenizer)
    tokens = [end, *run.tokenizer.encode(prompt, add_special_tokens=False).ids]
    found = np.asarray(
        sampling.generate(
            _apply_fn(run.config),
            run.params,
            jnp.asarray([tokens], jnp.int32),
            length,
            jax.random.key(seed),
            max_seq_len=run.config.data.seq_len,
            temperature=temperature,
        )
    )[0, 1:]
    ends = [i for i in np.flatnonzero(found == end) if i >= len(tokens) - 1]
    return observe.decoded(run.tokenizer, found[: ends[0]] if ends else found)


def evaluate(run: Trained, corpus: data.Corpus | None = None) -> dict[str, Any]:
    """Returns how well a run predicts a text: "tokens" that it was asked for, "nats" per token,
    "perplexity", and "bits" per byte of UTF-8, which compares models with other tokenizers.

    The text is the first `observe.VALIDATED` tokens of the validation split of `corpus`; None:
    of the run's own. The ends of documents count as tokens, and have no bytes.
    """
    corpus = run.config.run.corpus if corpus is None else corpus
    tokens = data.tokens("validation", corpus, run.tokenizer)[: observe.VALIDATED + 1]
    batches = observe.validation_batches(tokens, run.config)
    loss_fn = training.next_token_loss(_apply_fn(run.config))
    nats = training.evaluate(loss_fn, run.params, batches)["loss"]
    size = len(observe.decoded(run.tokenizer, tokens[1:]).encode())
    bits = nats * (len(tokens) - 1) / math.log(2) / max(size, 1)
    return dict(tokens=len(tokens) - 1, nats=nats, perplexity=math.exp(nats), bits=bits)
