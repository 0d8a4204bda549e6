"""Data, pipeline and tensor parallelism on one mesh, in plain JAX: the course's answer to the
last exercise of notebook 12.

The Transformer of notebook 5 (`tiny_transformer`) on a mesh with three axes:

    "data"    each group has a part of the batch; gradients are summed (`jax.grad` adds the sum,
              since parameters are not cut along "data")
    "pipe"    each stage has a part of the layers; M microbatches pass through the stages
              (GPipe, Huang et al., 2018, https://arxiv.org/abs/1811.06965)
    "tensor"  each device has a part of the heads and of the MLP's width (Shoeybi et al., 2019,
              https://arxiv.org/abs/1909.08053)

Capital letters at the end of a name are its shape, as in `tiny_transformer`.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from course_lib.lessons.tiny_transformer import mix_positions, rms_norm
from course_lib.many_devices.meshes import vary

SPECS = {
    "qkv": P("pipe", None, None, "tensor"),  # [N, D, 3, H, K]: heads are cut
    "out": P("pipe", "tensor"),  # [N, H, K, D]
    "up": P("pipe", None, "tensor"),  # [N, D, F]: the MLP's width is cut
    "down": P("pipe", "tensor"),  # [N, F, D]
    "norm1": P("pipe"),
    "norm2": P("pipe"),
    "token": P(),
    "position": P(),
    "norm": P(),
    "output": P(),
}
LAYER = ("qkv", "out", "up", "down", "norm1", "norm2")


@jax.checkpoint
def add_layer(x_BxLxD, layer):
    """One layer; each device adds what its heads and its part of the MLP's width compute."""
    heads_BxLxD = mix_positions(rms_norm(x_BxLxD, layer["norm1"]), layer)
    x_BxLxD += jax.lax.psum(heads_BxLxD, "tensor")
    h_BxLxF = jax.nn.gelu(rms_norm(x_BxLxD, layer["norm2"]) @ layer["up"])
    return x_BxLxD + jax.lax.psum(h_BxLxF @ layer["down"], "tensor"), None


def make_gradient(mesh, M):
    """Returns PartitionSpecs of the parameters by name, and `gradient(params, inputs_BxL,
    labels_BxL) -> (loss, grads)` of the mean loss, cut like them. The axes "data", "pipe" and
    "tensor" of the mesh divide the batch, the layers, and heads and MLP width; M microbatches
    per group along "data".
    """
    stages = mesh.shape["pipe"]
    to_next = [(stage, (stage + 1) % stages) for stage in range(stages)]

    def sum_on_device(params, inputs_BxL, labels_BxL):
        """The summed loss of this device's part of the batch; zero but on the last stage."""
        # Each device gets copies of its own, so that their gradients are summed once, at the
        # end of the backward pass. Without this line JAX sums where a parameter is used: in
        # every tick, and inside the conditional, where the other stages never arrive.
        params = vary(params, ("data", "pipe"))
        stage = jax.lax.axis_index("pipe")
        inputs_MxBxL, labels_MxBxL = (
            tokens.reshape(M, -1, tokens.shape[-1]) for tokens in (inputs_BxL, labels_BxL)
        )
        layers = {name: params[name] for name in LAYER}

        def head(x_BxLxD, labels_BxL):
            logits_BxLxV = rms_norm(x_BxLxD, params["norm"]) @ params["output"]
            return optax.softmax_cross_entropy_with_integer_labels(
                logits_BxLxV, labels_BxL
            ).sum()

        def tick(carry, t):
            """Stage s works on microbatch t - s. Before the first and after the last microbatch
            it works on copies, which add nothing to the loss.
            """
            arrived_BxLxD, total = carry
            tokens_BxL = inputs_MxBxL[jnp.clip(t, 0, M - 1)]
            embedded_BxLxD = params["token"][tokens_BxL] + params["position"]
            x_BxLxD = jnp.where(stage == 0, embedded_BxLxD, arrived_BxLxD)
            x_BxLxD, _ = jax.lax.scan(add_layer, x_BxLxD, layers)
            m = t - (stages - 1)  # the microbatch that reaches the last stage
            total += jax.lax.cond(
                (stage == stages - 1) & (m >= 0),
                head,
                lambda x_BxLxD, _: vary(jnp.zeros(()), ("data", "pipe")),
                x_BxLxD,
                labels_MxBxL[jnp.clip(m, 0, M - 1)],
            )
            return (jax.lax.ppermute(x_BxLxD, "pipe", to_next), total), None

        nothing_BxLxD = jnp.zeros((*inputs_MxBxL.shape[1:], params["token"].shape[1]))
        start = vary((nothing_BxLxD, jnp.zeros(())), ("data", "pipe"))
        (_, total), _ = jax.lax.scan(tick, start, jnp.arange(M + stages - 1))
        return jax.lax.psum(total, ("data", "pipe"))

    summed = jax.shard_map(
        sum_on_device, mesh=mesh, in_specs=(SPECS, P("data"), P("data")), out_specs=P()
    )

    def mean(params, inputs_BxL, labels_BxL):
        return summed(params, inputs_BxL, labels_BxL) / labels_BxL.size

    return SPECS, jax.value_and_grad(mean)
