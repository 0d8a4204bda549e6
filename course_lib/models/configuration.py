"""The fields of the Transformer, and which of them go together.

`configs` adds the fields of a training run. The rules between fields are checked there, before
anything runs, and whenever a model is traced (`transformer.apply`).
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from course_lib import arguments, fields
from course_lib.fields import FRACTION, NOT_NEGATIVE, Field, Rounding, Rule
from course_lib.models import attention, layers, routing
from course_lib.one_device import rematerialization
from course_lib.one_device.rematerialization import MODULES

DTYPES = ("float32", "bfloat16", "float16")
REMAT = Rule(set(MODULES).issuperset, f"hold names from {MODULES}")
NAMES = Rule(set(layers.NAMES).issuperset, f"hold names from {tuple(layers.NAMES)}")
MODEL = dict(
    num_layers=12,  # N: parameters, time and saved activations grow in proportion
    hidden_size=1024,  # D: parameters and time grow with its square, activations with it
    head_dim=128,  # K: below 64 the matrix units idle
    num_heads=8,  # H: H * K must be D
    attention_width=0,  # or this, if it is not 0
    mlp_expansion=4,  # F / D: most of the activations are the MLP's hidden ones
    mlp_size=0,  # F, if it is no multiple of D; 0 means mlp_expansion * hidden_size
    vocab_size=2048,  # rows of the token table; at least the tokenizer's
    num_outputs=2048,  # V: the loss holds several times 4 * B * L * V bytes of logits
    max_seq_len=512,  # learned positions; scores take H * L * L without flash
    dropout_rate=Field(0.1, FRACTION),  # with 0, no random numbers and no masks
    causal_mask=True,  # without it every position sees its own label
    dtype=Field("bfloat16", DTYPES),  # of activations; float16 needs a loss scale
    softmax_dtype=Field("float32", DTYPES),  # of scores, the largest arrays; bfloat16: half
    scan_layers=True,  # compiles one block instead of N; activations are stacked arrays
    remat=Rounding(("MLP", "Attn"), REMAT),  # computed again in the backward pass
    remat_policy=Rounding("nothing", rematerialization.POLICIES),  # what it still saves
    remat_names=Rounding((), NAMES),  # which named values "names" and "offload" keep
    attention=Rounding("reference", attention.IMPLEMENTATIONS),
    loss_chunks=Rounding(1),  # pieces of the logits, one at a time; more take less memory
    loss_along=Rounding("vocabulary", ("vocabulary", "tokens")),
    z_loss=0.0,  # times logsumexp(logits) ** 2, added to the loss; PaLM: 1e-4
    flat_products=Rounding(False),  # B and L as one dimension: faster on a CPU
    tied_embeddings=False,  # the output layer is the token table; without a bias
    # those from here on are explained in course_lib.models.layers
    attention_first=False,
    norm=Field("layer", ("layer", "rms")),
    norm_epsilon=1e-6,  # added to the variance
    qk_norm=False,  # normalizes queries and keys, so that scores stay small
    parallel_block=False,  # MLP beside attention: half as much to send along "tensor"
    num_kv_heads=0,  # G: heads of keys and values; fewer take less memory; 0 means H
    mlp_activation=Field("gelu", layers.ACTIVATIONS),
    mlp_gate=False,  # a third matrix of the MLP, which most models make smaller for it
    positions=Field("learned", layers.POSITIONS),  # "rotary" has no table
    rotary_base=10_000.0,  # of its slowest angle; larger for longer sequences
    rotary_scaling=Field("none", layers.ROTARY_SCALINGS),  # for sequences above these
    rotary_length=8192,  # "llama3": those of the training before
    rotary_factor=1.0,  # so many times as long, at most
    window=0,  # positions that one sees, its own and those just before; 0: all
    use_bias=True,  # False: matmuls and norms have no bias
    qkv_bias=False,  # queries, keys and values have one, whatever use_bias says
    num_experts=0,  # E MLPs, k of them per token; memory grows, FLOPs hardly
    experts_per_token=1,  # k: FLOPs of the MLP grow in proportion
    capacity_factor=1.25,  # slots per expert / its even share; fewer drop more tokens
    dropless=False,  # each expert computes all its tokens; capacity_factor does nothing
    balance_weight=Field(0.01, NOT_NEGATIVE),  # of a loss; at 0, a few experts may get all
)


def check(config: ConfigDict, seq_len: int) -> None:
    """Refuses an impossible model, or sequences of a length that it cannot see."""
    fields.check(config, fields.template(MODEL), fields.by_name(MODEL))
    arguments.refuse(errors(config, seq_len))


def errors(m: ConfigDict, seq_len: int) -> Iterator[str]:
    """Yields an error for each rule between fields of a model that it breaks."""
    remat, names, width = tuple(m.remat), tuple(m.remat_names), m.hidden_size
    in_parts = {"MLP", "Attn"} & set(remat)
    if m.positions == "learned" and seq_len > m.max_seq_len:
        yield (
            f"seq_len={seq_len} must be at most max_seq_len={m.max_seq_len}: later positions"
            " have no embedding; raise max_seq_len or cut the sequences"
        )
    if m.num_heads * m.head_dim != (m.attention_width or width):
        yield (
            f"head_dim={m.head_dim} must be hidden_size / num_heads = {width} / {m.num_heads},"
            f" or attention_width={m.attention_width} their product"
        )
    if m.num_kv_heads and m.num_heads % m.num_kv_heads:
        yield f"num_kv_heads={m.num_kv_heads} must divide num_heads={m.num_heads}, or be 0"
    if m.positions == "rotary" and m.head_dim % 2:
        yield f"head_dim={m.head_dim} must be even for positions='rotary', which turns pairs"
    if m.dropless and not m.num_experts:
        yield "dropless=True must be False for num_experts=0: there is no token to send"
    if m.positions != "rotary" and m.rotary_scaling != "none":
        yield f"rotary_scaling={m.rotary_scaling!r} must be 'none' without positions='rotary'"
    if m.window and not m.causal_mask:
        yield f"window={m.window} must be 0 without causal_mask: it is of earlier positions"
    if m.num_experts:
        routed = m.num_experts, m.experts_per_token, m.capacity_factor
        if routed[1] > routed[0]:
            yield f"experts_per_token={routed[1]} must be between 1 and num_experts={routed[0]}"
        if not routing.capacity(seq_len, *routed):
            yield f"capacity_factor={routed[2]} must be larger: no expert has room; take 1.25"
        if m.parallel_block:
            yield f"num_experts={routed[0]} must be 0 for parallel_block=True"
    if m.attention_first and m.parallel_block:
        yield "attention_first=True must be False for parallel_block=True, which has no order"
    if m.tied_embeddings and m.num_outputs != m.vocab_size:
        yield (
            f"num_outputs={m.num_outputs} must be vocab_size={m.vocab_size} for"
            " tied_embeddings=True: the token table is the output layer, too"
        )
    if m.parallel_block and in_parts:
        yield (
            f"remat={remat} must be () or ('Block',) for parallel_block=True, which computes"
            " MLP and attention together"
        )
    if m.loss_chunks != 1:
        from course_lib.smaller_and_faster import large_vocabulary  # most models need it not

        large_vocabulary.check(
            m.loss_chunks,
            m.loss_along,
            tokens=seq_len,
            vocabulary=m.num_outputs,
            prefix="loss_",
        )
    yield from rematerialization.errors(m.remat_policy, names)
    if m.remat_policy != "nothing" and not remat:
        yield f"remat_policy={m.remat_policy!r} must be 'nothing' for remat=(): or fill remat"
    for name in names:
        if not {layers.NAMES[name], "Block"} & set(remat):
            yield (
                f"remat={remat} must hold {layers.NAMES[name]!r} or 'Block' for remat_names to"
                f" hold {name!r}: a module that is not rematerialized keeps it anyway"
            )
    yield from attention.errors(
        m.attention,
        dtype=m.dtype,
        softmax_dtype=m.softmax_dtype,
        head_dim=m.head_dim,
    )
