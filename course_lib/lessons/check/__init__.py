"""Checks of the notebooks' exercises: each runs the learner's answer and says what is wrong.

    from course_lib.lessons import check

    check.accumulation(your_accumulate)

A check prints one line and never raises.
"""

from course_lib.lessons.check.async_tensor_parallel import (
    hidden_with_latency,
    order_of_arrival,
    two_way_product,
)
from course_lib.lessons.check.buffer_donation import (
    aliased_bytes,
    all_of_the_state,
    best_state,
)
from course_lib.lessons.check.collectives import (
    cut_norm,
    mean_gradient,
    two_levels,
)
from course_lib.lessons.check.context_parallel import (
    merge,
    ring_bytes,
    ulysses,
    work_in_order,
)
from course_lib.lessons.check.data_parallel import (
    fsdp,
    sum_in_buckets,
    summed_once,
    traffic_of_minibatches,
)
from course_lib.lessons.check.expert_parallel import (
    dropped,
    expert_layer,
    least_room,
    places,
)
from course_lib.lessons.check.flash_attention import (
    gradient_kernel,
    largest_tiles,
    query_gradient,
    window_pairs,
)
from course_lib.lessons.check.gradient_accumulation import (
    accumulation,
    forgotten_division,
    multi_steps_share,
    smallest_number_of_minibatches,
)
from course_lib.lessons.check.large_vocabulary import (
    bytes_of_logits,
    one_pass,
    online_logsumexp,
)
from course_lib.lessons.check.mixed_precision import (
    loss_scale_range,
    scaled_step,
    small_tanh,
    stochastic_round,
)
from course_lib.lessons.check.offload import (
    streamed_bytes,
    streamed_momentum,
    what_to_offload,
)
from course_lib.lessons.check.optimizer_memory import (
    lion_8bit,
    lost_updates,
    state_of_a_matrix,
)
from course_lib.lessons.check.pipeline_parallel import (
    bubble_share,
    fast_pipeline,
    gpipe,
    one_f_one_b,
    shared_slots,
    stash,
)
from course_lib.lessons.check.profiling import (
    busy_and_idle,
    mfu,
    named_part,
    on_h100,
    stack_less,
    stacked,
)
from course_lib.lessons.check.rematerialization import (
    depth,
    keep_one_value,
    square_root,
)
from course_lib.lessons.check.smallest_step import (
    add_in_place,
    bytes_of_state,
    update_in_backward,
)
from course_lib.lessons.check.strategies import three_axes, twice_the_gpus
from course_lib.lessons.check.tensor_parallel import (
    divided_embedding,
    gated_mlp,
    missing_sum,
    padded_vocabulary,
)
from course_lib.lessons.check.train_for_real import (
    lost_time,
    may_change,
    noise_scale,
    room_for_checkpoints,
)
from course_lib.lessons.check.transformer import (
    attend,
    count_parameters,
    looks_ahead,
    scan_over_layers,
    scores_outgrow_mlp,
)

__all__ = [
    "accumulation",
    "add_in_place",
    "aliased_bytes",
    "all_of_the_state",
    "attend",
    "best_state",
    "bubble_share",
    "busy_and_idle",
    "bytes_of_logits",
    "bytes_of_state",
    "count_parameters",
    "cut_norm",
    "depth",
    "divided_embedding",
    "dropped",
    "expert_layer",
    "fast_pipeline",
    "forgotten_division",
    "fsdp",
    "gated_mlp",
    "gpipe",
    "gradient_kernel",
    "hidden_with_latency",
    "keep_one_value",
    "largest_tiles",
    "least_room",
    "lion_8bit",
    "looks_ahead",
    "loss_scale_range",
    "lost_time",
    "lost_updates",
    "may_change",
    "mean_gradient",
    "merge",
    "mfu",
    "missing_sum",
    "multi_steps_share",
    "named_part",
    "noise_scale",
    "on_h100",
    "one_f_one_b",
    "one_pass",
    "online_logsumexp",
    "order_of_arrival",
    "padded_vocabulary",
    "places",
    "query_gradient",
    "room_for_checkpoints",
    "ring_bytes",
    "scaled_step",
    "scan_over_layers",
    "scores_outgrow_mlp",
    "shared_slots",
    "small_tanh",
    "smallest_number_of_minibatches",
    "square_root",
    "stack_less",
    "stacked",
    "stash",
    "state_of_a_matrix",
    "stochastic_round",
    "streamed_bytes",
    "streamed_momentum",
    "sum_in_buckets",
    "summed_once",
    "three_axes",
    "traffic_of_minibatches",
    "twice_the_gpus",
    "two_levels",
    "two_way_product",
    "ulysses",
    "update_in_backward",
    "what_to_offload",
    "window_pairs",
    "work_in_order",
]
