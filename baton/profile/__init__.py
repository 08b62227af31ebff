"""Measurements on this machine: `baton profile` measures for the cost model, `baton bench` compares the rollout
modes."""

from baton.profile.engine import keep_busy as keep_busy
from baton.profile.measure import profile as profile
from baton.profile.measure import write_calibration as write_calibration
