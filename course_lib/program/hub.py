"""Models of the Hugging Face Hub: a Llama, Mistral, Qwen2, Qwen3 or GPT-2 begins a run, and a
run becomes a folder that `transformers` reads.

    hub.model("llama/config.json")                   # the fields of its model
    hub.load("llama", config.model)                  # its parameters
    hub.export(trained.load("runs/books"), "books")  # config, weights and tokenizer

hub.toml has the names. Dropout is not read: it is 0.
"""

import json
import math
import os
import pathlib
import tempfile
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from course_lib import arguments, extras, fields, files
from course_lib.models import parameters
from course_lib.models.configuration import MODEL
from course_lib.text import data

Folder = str | os.PathLike[str]


class Family(NamedTuple):
    """A table of hub.toml."""

    architecture: str
    same: dict[str, Any]
    needed: dict[str, Any]
    sizes: dict[str, str]
    modules: dict[str, list[str]]
    prefix: str
    layers: str
    turned: bool


SAME = dict(attention_first=True, parallel_block=False, num_experts=0, causal_mask=True)
TABLES = tomllib.loads((pathlib.Path(__file__).parent / "hub.toml").read_text())
LLAMA, GPT2 = (Family(**t | dict(same=SAME | t["same"])) for t in TABLES.values())
QWEN2 = LLAMA._replace(architecture="Qwen2ForCausalLM", same=LLAMA.same | dict(qkv_bias=True))
QWEN3 = LLAMA._replace(architecture="Qwen3ForCausalLM", same=LLAMA.same | dict(qk_norm=True))
MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    same={field: x for field, x in LLAMA.same.items() if field != "window"},
    sizes=LLAMA.sizes | dict(window="sliding_window"),
)
FAMILIES = dict(llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3, gpt2=GPT2)
"""The families by the Hub's `model_type`."""

SYNONYMS = {"gelu_new": "gelu_pytorch_tanh"}
SCALED = dict(rotary_factor="factor", rotary_length="original_max_position_embeddings")
PARTS = {"attn/qkv": 3, "attn/kv": 2}  # query, key and value of a head lie side by side
UNUSED = (
    ".inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "lm_head.weight",
)  # constants, and tied


def holds(folder: Folder) -> bool:
    """Returns whether a folder's config.json is the Hub's, and not a run's."""
    try:
        return "model_type" in json.loads((pathlib.Path(folder) / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def model(path: Folder) -> dict[str, Any]:
    """Returns the fields of our model for a config.json of the Hub, or for its folder. Raises a
    ValueError with all that our model has not.
    """
    path = pathlib.Path(path, "config.json" if os.path.isdir(path) else "")
    try:
        hub = {n: x for n, x in json.loads(path.read_text()).items() if x is not None}
        return _fields(hub)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} must be a config.json of the Hub: {error}") from None


def _fields(hub: dict[str, Any]) -> dict[str, Any]:
    if (kind := hub.get("model_type")) not in FAMILIES:
        raise ValueError(f"model_type={kind!r} must be one of {list(FAMILIES)}")
    family = FAMILIES[kind]
    usual = {"rope_theta": 1e4, "tie_word_embeddings": family is GPT2}
    usual["num_key_value_heads"] = hub.get("num_attention_heads")
    hub = usual | hub.get("rope_parameters", {}) | hub  # as `transformers` 5 writes rope_theta
    found = {field: hub[name] for field, name in family.sizes.items() if name in hub}
    optional = {"head_dim", "window"} | ({"mlp_size"} if family is GPT2 else set())
    if lacks := [n for f, n in family.sizes.items() if f not in found.keys() | optional]:
        raise ValueError(f"it lacks {', '.join(lacks)}")
    if dtype := hub.get("dtype", hub.get("torch_dtype")):
        # of the stored numbers; to compute in float16 needs a loss scale
        found["dtype"] = "bfloat16" if dtype == "float16" else dtype
    found |= _rope(hub)
    fields.check(found, fields.template(MODEL), fields.by_name(MODEL), may_lack=True)
    width, heads = found["hidden_size"], found["num_heads"]
    found = dict(mlp_size=4 * width, head_dim=width // heads) | found
    found |= dict(num_outputs=found["vocab_size"], dropout_rate=0.0)
    size = heads * found["head_dim"]
    found["attention_width"] = size if size != width else 0
    if found.get("num_kv_heads") == heads:
        found["num_kv_heads"] = 0
    if wrong := list(_unlike(hub, family, found)):
        raise ValueError("; ".join(wrong))
    return found | family.same


def _unlike(hub: dict[str, Any], family: Family, found: dict[str, Any]) -> Iterator[str]:
    """Yields an error for each value of the Hub's fields that our model has not."""
    same = {n: family.same[f] for f, n in family.sizes.items() if f in family.same}
    for name, value in (family.needed | same | dict(quantization_config=None)).items():
        if (given := hub.get(name, value)) not in (value, SYNONYMS.get(value)):
            yield f"{name}={json.dumps(given)} must be {json.dumps(value)}"
    if "head_dim" not in hub and found["hidden_size"] % found["num_heads"]:
        yield f"{found['num_heads']} heads must divide {found['hidden_size']}, the width"
    all_slide = "window" in family.sizes
    kind = ["full_attention", "sliding_attention"][hub.get("use_sliding_window", all_slide)]
    wanted = "sliding_attention" if all_slide else "full_attention"
    window, longest = hub.get("sliding_window", 0), found["max_seq_len"]
    if 0 < window < longest and {*hub.get("layer_types", [kind])} != {wanted}:
        must = f"null or at least max_position_embeddings={longest}"
        more = f"; up to {window} tokens, write both so"
        yield f"sliding_window={window} must be {must}, unless all layers of a Mistral{more}"


def _rope(hub: dict[str, Any]) -> dict[str, Any]:
    """Returns our fields of scaled rotary positions, as `transformers` 4 or 5 names them."""
    name = "rope_scaling" if "rope_scaling" in hub else "rope_parameters"
    given = {n: x for n, x in hub.get(name, {}).items() if n != "rope_theta"}
    kind = given.pop("type", given.pop("rope_type", "default"))
    found = dict(rotary_scaling="none" if kind == "default" else kind)
    found |= {ours: given[n] for ours, n in SCALED.items() if n in given}
    if kind not in ("default", "linear", "llama3") or _scaled(found) != given:
        must = "null, or linear (factor), or llama3 (factor, original_max_position_embeddings,"
        more = " low_freq_factor=1, high_freq_factor=4)"
        raise ValueError(f"{name}={json.dumps(hub[name])} must be {must}{more}")
    return found


def _scaled(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the Hub's fields of scaled rotary positions."""
    kind = fields["rotary_scaling"]
    names = dict(linear=["rotary_factor"], llama3=list(SCALED)).get(kind, [])
    more = dict(low_freq_factor=1.0, high_freq_factor=4.0) if kind == "llama3" else {}
    return {SCALED[name]: fields.get(name) for name in names} | more


def _stored(
    family: Family, name: str, array: np.ndarray
) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Yields the Hub's tensors of one of our arrays: name, shape, and a view of our array that
    has their numbers in their order.
    """
    if name.startswith("block/"):
        for i, of_layer in enumerate(array):
            yield from _stored(family, name.replace("block", f"block_{i}", 1), of_layer)
        return
    module, _, kind = name.rpartition("/")
    prefix = family.prefix * (module != "output_layer")
    if name.startswith("block_"):
        layer, _, module = module.removeprefix("block_").partition("/")
        prefix += f"{family.layers}.{layer}."
    names, count = family.modules[module], PARTS.get(module, 1)
    split = array.reshape(*array.shape[:-1], count, -1)  # [D H 3K] to [D H 3 K]
    one = len(names) < count  # of GPT-2: [D 3 H K]
    parts = [split.swapaxes(-2, -3)] if one else list(np.moveaxis(split, -2, 0))
    for each, part in zip(names, parts, strict=True):
        shape: tuple[int, ...] = part.shape if kind == "embedding" else (part.size,)
        if kind == "kernel":
            inputs = array.ndim - 1 if module.endswith("output_layer") else 1
            shape = math.prod(part.shape[:inputs]), math.prod(part.shape[inputs:])
            if family.turned:
                part = part.transpose(*range(inputs, part.ndim), *range(inputs))
                shape = shape[::-1]
        yield f"{prefix}{each}.{'bias' if kind == 'bias' else 'weight'}", shape, part


def _tensors(folder: pathlib.Path, family: Family) -> dict[str, tuple[Any, str]]:
    """Returns the file of each tensor, and its name there."""
    with extras.needed("training"):
        import safetensors

    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    try:
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        opened = [safetensors.safe_open(folder / name, "numpy") for name in sorted(names)]
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        lacks = f"{str(folder)!r} must have model.safetensors, or {index.name}: {error}"
        raise ValueError(lacks) from None
    known = family.prefix, "lm_head."  # models without a head are stored without the prefix
    return {
        name if name.startswith(known) else family.prefix + name: (file, name)
        for file in opened
        for name in file.keys()
    }


def load(folder: Folder, config: ConfigDict, *, only_check: bool = False) -> Any:
    """Returns the float32 parameters of a folder of the Hub, for the `model` part of a
    configuration. Raises a ValueError if it has others; `only_check` reads names and shapes.
    """
    folder = pathlib.Path(folder)
    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    tensors = _tensors(folder, family)

    def ours(path: Any, like: Any) -> np.ndarray | None:
        array = np.empty(like.shape, np.float32)
        for name, shape, view in _stored(family, arguments.name_in_tree(path), array):
            file, there = tensors.pop(name, (None, name))
            found = file and tuple(file.get_slice(there).get_shape())
            if found != shape:
                must = f"{name} must have the shape {shape}, and has {found}"
                raise ValueError(f"{str(folder)!r} is another model: {must}")
            if not only_check:
                view[...] = file.get_tensor(there).reshape(view.shape)
        return None if only_check else array

    shapes = jax.eval_shape(lambda: parameters.init(jax.random.key(0), config))
    params = jax.tree_util.tree_map_with_path(ours, shapes)
    if more := [name for name in tensors if not name.endswith(UNUSED)]:
        raise ValueError(f"{str(folder)!r} is another model: it also has {', '.join(more[:5])}")
    return params


def export(run: Any, folder: Folder) -> str:
    """Writes the model and tokenizer of a `trained.Trained` into a new folder, and returns its
    class in `transformers`. Raises a ValueError if the folder exists, or no class fits.
    """
    with extras.needed("training"):
        import safetensors.numpy

    folder, m = pathlib.Path(folder), run.config.model
    if folder.exists():
        raise ValueError(f"{str(folder)!r} exists: name a new folder")
    family = FAMILIES[kind := _kind(m)]
    leaves = jax.tree_util.tree_leaves_with_path(run.params)
    tensors = {  # `safetensors` writes an array's memory as it lies
        name: np.ascontiguousarray(view.reshape(shape))
        for path, leaf in leaves
        for name, shape, view in _stored(family, arguments.name_in_tree(path), np.asarray(leaf))
    }
    sizes = m.to_dict() | dict(num_kv_heads=m.num_kv_heads or m.num_heads)
    sizes["mlp_size"] = m.mlp_size or m.mlp_expansion * m.hidden_size
    sizes["max_seq_len"] = max(m.max_seq_len, run.config.data.seq_len * (family is not GPT2))
    config = dict(architectures=[family.architecture], model_type=kind) | family.needed
    config |= {name: sizes[field] for field, name in family.sizes.items()}
    if family is GPT2:
        config |= dict(resid_pdrop=m.dropout_rate, embd_pdrop=0.0, attn_pdrop=0.0)
    elif scaled := _scaled(sizes):
        config["rope_scaling"] = dict(rope_type=m.rotary_scaling) | scaled
    end = data.end_of(run.tokenizer)
    config |= dict(bos_token_id=end, eos_token_id=end, torch_dtype=str(leaves[0][1].dtype))
    words = dict.fromkeys(("bos_token", "eos_token"), run.tokenizer.id_to_token(end))
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".part", f"{folder.name}.", folder.parent) as part:
        new = pathlib.Path(part) / folder.name
        new.mkdir()
        try:
            safetensors.numpy.save_file(tensors, new / "model.safetensors", {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{folder} cannot be written: {files.why(error)}") from None
        (new / "model.safetensors").chmod(0o644)  # as the others
        (new / "config.json").write_text(json.dumps(config, indent=1))
        (new / "tokenizer_config.json").write_text(json.dumps(words, indent=1))
        (new / "tokenizer.json").write_text(run.tokenizer.to_str())
        files.to_disk(*new.iterdir(), new)
        new.rename(folder)
    files.to_disk(folder.parent)
    return family.architecture


def _kind(m: ConfigDict) -> str:
    """Returns the `model_type` of a model, or names the fields that keep it from having one."""
    given = m.to_dict() | dict(num_kv_heads=m.num_kv_heads * (m.num_kv_heads != m.num_heads))
    wrong = {
        kind: [(f, x) for f, x in family.same.items() if given[f] != x]
        for kind, family in FAMILIES.items()
    }
    kind = min(wrong, key=lambda kind: len(wrong[kind]))
    if wrong[kind]:
        unlike = "; ".join(f"model.{f}={given[f]!r} must be {x!r}" for f, x in wrong[kind])
        raise ValueError(
            f"{unlike}: only then is it a {FAMILIES[kind].architecture}; models of the preset"
            " 'llama' can be exported"
        )
    return kind
