"""Reward functions of the tests: good ones and every kind of bad one."""

import ctypes
import os
import re
import subprocess
import sys
import time


def tokens(rollout):
    return rollout.sampled_tokens


def half(rollout):
    return 0.5


def right(rollout):
    return True


def noisy(rollout):
    print("noise " * 1000)
    sys.stdout.flush()
    os.write(1, b"\x00\x00\x00\x02{}")
    subprocess.run(["echo", "noise of a child"], check=True)
    return 0.25


def reads_stdin(rollout):
    return float(len(sys.stdin.read()))


def has_torch(rollout):
    return float("torch" in sys.modules)


def raises(rollout):
    raise KeyError("no answer in the rollout")


def leaves(rollout):
    sys.exit(3)


def nan(rollout):
    return float("nan")


def text(rollout):
    return "1.0"


def huge(rollout):
    return 10**400


def crashes(rollout):
    os._exit(7)


def segfaults(rollout):
    ctypes.string_at(0)


def loops(rollout):
    while True:
        pass


def never_lets_go_of_the_interpreter(rollout):
    """Backtracks for ages in C code, which lets no other thread run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def sleeps_by_reward(rollout):
    """Slow for one rollout only; says how long it took, so that a late reply would be recognized."""
    time.sleep(rollout.env_reward)
    return rollout.env_reward


def starts_a_child_and_loops(rollout):
    child = subprocess.Popen(["sleep", "300"])
    with open(rollout.reason, "w") as file:
        file.write(str(child.pid))
    loops(rollout)


def crashes_once(rollout):
    path = rollout.reason
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return 1.0
