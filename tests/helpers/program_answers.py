"""Right and wrong answers to the exercises of notebook 21, for `test_check`."""

from course_lib.lessons import check

FUNCTIONS = [check.lost_time, check.may_change]
PREDICTIONS = {check.noise_scale: 3, check.room_for_checkpoints: 2}
CHANGEABLE = ("training.steps", "mesh.tensor", "run.log_every")


def share(interval, write, between):
    return write / interval + interval / (2 * between)


def one_of(*fields):
    return lambda field: field in fields


RIGHT = [
    (check.lost_time, (share,)),
    (check.noise_scale, (125, 2000, 16)),
    (check.room_for_checkpoints, (84, 420)),
    (check.may_change, (one_of(*CHANGEABLE),)),
]
WRONG = [
    (check.lost_time, (lambda i, w, b: 100 * (w / i + i / (2 * b)),), "in percent"),
    (check.lost_time, (lambda interval, write, between: write / interval,), "Failures"),
    (check.lost_time, (lambda interval, write, between: interval / (2 * between),), "Writing"),
    (check.lost_time, (lambda i, write, b: write / i + i / b,), "not all"),
    (check.lost_time, (lambda i, write, b: write + i / 2,), "per interval"),
    (check.lost_time, (lambda i, write, b: 10 / i + i / (2 * b),), "30 s to write"),
    (check.noise_scale, (250, 2000, 8), "squares"),
    (check.noise_scale, (150, 2000, 13), "smaller than 150"),
    (check.noise_scale, (100, 2000, 20), "larger than 100"),
    (check.noise_scale, (125, 8000, 64), "smaller than 8000"),
    (check.noise_scale, (125, 1000, 8), "variances"),
    (check.noise_scale, (125, 500, 4), "one example"),
    (check.noise_scale, (125, 2000, 4), "tr Sigma / |G|^2"),
    (check.noise_scale, (125, 2000, 1 / 16), "ratio"),
    (check.room_for_checkpoints, (28, 140), "parameters alone"),
    (check.room_for_checkpoints, (56, 280), "two numbers"),
    (check.room_for_checkpoints, (112, 560), "gradient"),
    (check.room_for_checkpoints, (42, 210), "2 bytes"),
    (check.room_for_checkpoints, (84e9, 420e9), "in bytes"),
    (check.room_for_checkpoints, (78.2, 391), "GiB"),
    (check.room_for_checkpoints, (70, 350), "not 70 GB"),
    (check.room_for_checkpoints, (84, 84), "keeps several"),
    (check.room_for_checkpoints, (84, 252), "best one"),
    (check.room_for_checkpoints, (84, 336), "writes the next"),
    (check.room_for_checkpoints, (84, 504), "6 checkpoints"),
    (check.may_change, (lambda field: "yes",), "True or False"),
    (check.may_change, (one_of("training.steps", "run.log_every"),), "order of sums"),
    (check.may_change, (one_of("mesh.tensor", "run.log_every"),), "already taken"),
    (check.may_change, (one_of(*CHANGEABLE, "data.batch_size"),), "other examples"),
    (check.may_change, (one_of(*CHANGEABLE, "optimizer.total_steps"),), "schedule"),
]
