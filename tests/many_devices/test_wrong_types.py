"""Arguments of a wrong type are refused with a sentence that says how to make a right one.

While tests run, beartype refuses them first, so a process without it makes the calls.
"""

import subprocess
import sys

CALLS = """
from course_lib import configs, planner
from course_lib.lessons import backtest
from course_lib.many_devices import meshes
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware
from course_lib.planner import Course, Frameworks, Plan, Shape, ranked

h100 = hardware.get("h100")
cluster = Cluster(h100, 64)
shape, plan = Shape(32, 4096, 32, 128, 16384, 51200, 2048), Plan({"data": 64}, 64)
config = configs.get("80gb")
for call, words in (
    (lambda: Cluster(None, 64), "accelerator=None must be a row"),
    (lambda: planner.step(plan, shape), "shape=Plan(...) must be a Shape"),
    (lambda: planner.seconds(planner.step(shape, plan), h100), "must be a Cluster: Cluster("),
    (lambda: planner.seconds(shape, cluster), "step=Shape(...) must be a Step: planner.step("),
    (lambda: Course(config, reorder="no"), "reorder='no' must be True or"),
    (lambda: backtest.same_mfu(backtest.load(), []), "fitted_to must have at least one"),
    (lambda: backtest.predict([None]), "rows=None must be rows of backtest.load()"),
    (lambda: ranked(Course(config), 64), "cluster=64 must be a Cluster: Cluster("),
    (lambda: Course("80gb"), "config='80gb' must be a configuration"),
    (lambda: planner.estimate("80gb", {"data": 64}, None, cluster), "must be a configuration"),
    (lambda: planner.estimate(config, ["data"], None, cluster), "axes=['data'] must be a map"),
    (lambda: meshes.make(["data"]), "axes=['data'] must be a mapping of sizes by name"),
    (lambda: meshes.make({"data": "1"}), "axes={'data': '1'} must have whole numbers"),
    (lambda: meshes.make({"data": 1.0}), "axes={'data': 1.0} must have whole numbers"),
    (lambda: meshes.simulate("8"), "count='8' must be a whole number of devices"),
    (lambda: Frameworks(plan, 64), "must be a Shape: the sizes"),
    (lambda: Plan({"data": 64}, 64, recompute=["block"]), "must be one of"),
    (lambda: Plan({"data": 64}, 64, dtype=None), "dtype=None must be the name of a floating"),
    (lambda: Plan({"data": 64}, 64, dtype="int32"), "dtype='int32' must be the name of a flo"),
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
