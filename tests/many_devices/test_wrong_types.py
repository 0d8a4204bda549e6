"""Arguments of a wrong type are refused with a sentence that says how to make a right one.

While tests run, beartype refuses them first, so a process without it makes the calls.
"""

import subprocess
import sys

CALLS = """
from course_lib import configs
from course_lib.lessons import backtest, frameworks
from course_lib.many_devices import cluster_model, estimate, meshes, step_model
from course_lib.many_devices.cluster_model import Cluster, Group, all_gather, network_share
from course_lib.many_devices.plans import Plan, Shape
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import hardware

h100 = hardware.get("h100")
cluster = Cluster(h100, 64)
group = cluster.group({"data": 64}, "data")
shape, plan = Shape(32, 4096, 32, 128, 16384, 51200, 2048), Plan({"data": 64}, 64)
config = configs.get("80gb")
for call, words in (
    (lambda: Cluster(None, 64), "accelerator=None must be a row"),
    (lambda: Cluster(h100, 64, products_share="0.7"), "products_share='0.7' must be a number"),
    (lambda: cluster.group([64], "data"), "axes=[64] must be a mapping"),
    (lambda: cluster.group({"data": 64}, None), "over=None must be an axis or several"),
    (lambda: all_gather(cluster, 1e9), "must be a Group, as Cluster.group returns it"),
    (lambda: all_gather(1e9, group), "group=1000000000.0 must be a Group"),
    (lambda: all_gather(group, "1e9"), "size='1e9' must be a number of bytes"),
    (lambda: network_share("4"), "hosts='4' must be a whole number"),
    (lambda: cluster.group({"data": 64}, ()), "over=() must name at least one axis"),
    (lambda: cluster.group({"data": 64}, ("data", "data")), "must name at least one axis, and"),
    (lambda: Group(8.5, 2, 1e9, 1e9, link=1e9), "ranks=8.5 must be a whole number"),
    (lambda: Group(8, "2", 1e9, 1e9, link=1e9), "per_switch='2' must be a whole number"),
    (lambda: step_model.breakdown(plan, shape, cluster), "shape=Plan(...) must be a Shape"),
    (lambda: step_model.breakdown(shape, plan, h100), "must be a Cluster: Cluster("),
    (lambda: estimate.choose(config, cluster, reorder="no"), "reorder='no' must be True or"),
    (lambda: list(frameworks.meshes(shape, "64")), "count='64' must be a whole number of GPUs"),
    (lambda: list(frameworks.meshes(shape, 0)), "count=0 must be a whole number of GPUs"),
    (lambda: backtest.same_mfu(backtest.load(), []), "fitted_to must have at least one"),
    (
        lambda: estimate.plan_of(config, {"tensor": 8}, Strategy()),
        "axes={'tensor': 8} must have an axis 'data'",
    ),
    (lambda: backtest.predict([None]), "rows=None must be rows of backtest.load()"),
    (lambda: estimate.choose(config, 64), "cluster=64 must be a Cluster: Cluster("),
    (lambda: estimate.choose("80gb", cluster), "config='80gb' must be a configuration"),
    (lambda: estimate.estimate("80gb", {"data": 64}, None, cluster), "must be a configuration"),
    (lambda: estimate.estimate(config, ["data"], None, cluster), "axes=['data'] must be a map"),
    (lambda: meshes.make(["data"]), "axes=['data'] must be a mapping of sizes by name"),
    (lambda: meshes.make({"data": "1"}), "axes={'data': '1'} must have whole numbers"),
    (lambda: meshes.make({"data": 1.0}), "axes={'data': 1.0} must have whole numbers"),
    (lambda: meshes.simulate("8"), "count='8' must be a whole number of devices"),
    (lambda: frameworks.search(plan, cluster, 64), "must be a Shape: the sizes"),
    (lambda: frameworks.search(shape, cluster, 64, tensor_overlap="no"), "must be True or Fal"),
    (
        lambda: frameworks.search(shape, cluster, 64, recompute=("block", "none")),
        "must be in the order of ('none', 'selective', 'block')",
    ),
    (lambda: frameworks.search(shape, "h100", 64), "cluster='h100' must be a Cluster"),
    (lambda: Cluster(h100, 64, ring_latency="5e-6"), "ring_latency='5e-6' must be a number"),
    (lambda: Plan({"data": 64}, 64, schedule="1f1b"), "must be a Schedule: schedules.make("),
    (lambda: Plan("data", 64), "axes='data' must be a mapping"),
    (lambda: Plan({"data": 64}, 64, recompute=["block"]), "must be one of"),
    (lambda: Plan({"data": 64}, 64, dtype=None), "dtype=None must be the name of a floating"),
    (lambda: Plan({"data": 64}, 64, dtype="int32"), "dtype='int32' must be the name of a flo"),
    (lambda: Group(2, 2, 1e9, 0.0, link=0.0), "link=0.0 must be above 0"),
    (lambda: Group(2, 2, 1e9, 0.0, link=1.0, latency=-1.0), "latency=-1.0, hop=0.0 and step"),
):
    try:
        print("accepted, without:", words, call())
    except (TypeError, ValueError) as error:
        if words not in str(error):
            print("wanted:", words, "| said:", error)
"""


def test_every_wrong_type_is_refused_with_a_sentence():
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
