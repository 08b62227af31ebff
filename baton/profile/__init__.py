"""Measurements of this machine for the cost model and of the rollout modes: `baton profile` and `baton bench`."""

from baton.profile.engine import keep_busy as keep_busy
from baton.profile.measure import profile as profile
from baton.profile.measure import write_calibration as write_calibration
